"""One process trains twice with the same seed. In the second training, someone looks at a random image in each epoch.

python -m examples.tutorial.one_process --bug    all random numbers come from torch's global generator
python -m examples.tutorial.one_process          the order of an epoch is a function of (seed, epoch)
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

from lit_mnist.data.dataset import load_dataset

SEED, SAMPLES, BATCH, EPOCHS, TESTED = 1, 2000, 50, 3, 1000
DATA = load_dataset()


def order_of(epoch: int) -> torch.Tensor:
    """Returns a permutation of the training samples."""
    if "--bug" in sys.argv:
        return torch.randperm(SAMPLES)
    # The factor keeps the epochs of one seed apart from those of the next.
    generator = torch.Generator().manual_seed(1_000_000 * SEED + epoch)
    return torch.randperm(SAMPLES, generator=generator)


def train(*, look: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    """Returns the trained network, and the order of each epoch."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    orders = []
    for epoch in range(EPOCHS):
        if look:
            # Shows a random image to a human, and changes nothing: or so it seems.
            _image = DATA.train.images[int(torch.randint(SAMPLES, ()))]
        orders.append(order_of(epoch))
        for indices in orders[-1].split(BATCH):
            images, labels = DATA.train.images[indices] / 255, DATA.train.labels[indices]
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    return net, orders


def main() -> None:
    """Trains twice and compares."""
    (plain, plain_orders), (looked, looked_orders) = train(look=False), train(look=True)
    for epoch, (one, other) in enumerate(zip(plain_orders, looked_orders, strict=True)):
        print(f"epoch {epoch}: {int((one == other).sum())} of {SAMPLES} samples are at the same place in both runs")
    pairs = zip(plain.state_dict().values(), looked.state_dict().values(), strict=True)
    print(f"the final weights differ by up to {max(float((a - b).abs().max()) for a, b in pairs):.3f}")
    images, labels = DATA.test.images[:TESTED] / 255, DATA.test.labels[:TESTED]
    differ = int((plain(images).argmax(dim=1) != looked(images).argmax(dim=1)).sum())
    correct = [int((net(images).argmax(dim=1) == labels).sum()) for net in (plain, looked)]
    print(f"test accuracy {correct[0] / TESTED:.1%} and {correct[1] / TESTED:.1%}, ", end="")
    print(f"{'some' if differ else 'no'} predictions differ")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
