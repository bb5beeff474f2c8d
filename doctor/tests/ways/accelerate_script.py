"""accelerate launch --multi_gpu --num_processes=2 accelerate_script.py, or python accelerate_script.py notebook"""

import sys

import torch
from accelerate import Accelerator, debug_launcher
from model import build, samples
from torch import nn
from torch.utils.data import DataLoader


def training_loop(mixed_precision="no"):
    accelerator = Accelerator(mixed_precision=mixed_precision)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    if "notebook" in sys.argv:
        debug_launcher(training_loop, args=("no",), num_processes=2)
    else:
        training_loop()
