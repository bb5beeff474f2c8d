"""A training program with two silent faults, which docs/guide.md examines."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs: int = 2) -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    images, targets = torch.randn(512, 1, 8, 8), torch.randint(10, (512,))
    data = TensorDataset(images, targets)
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels) / distributed.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
