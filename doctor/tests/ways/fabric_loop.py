"""python fabric_loop.py, or fabric run --devices=2 --strategy=ddp fabric_loop.py"""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from model import build, samples
from torch.utils.data import DataLoader


def main():
    by_command = "LT_CLI_USED" in os.environ
    fabric = Fabric() if by_command else Fabric(accelerator="cpu", devices=2, strategy="ddp")
    if not by_command:
        fabric.launch()
    model = build()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=8, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
