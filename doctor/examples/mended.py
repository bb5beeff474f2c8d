"""The program train.py without its faults: the order of an epoch changes, DDP averages, and no norm sees the batch."""

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
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
