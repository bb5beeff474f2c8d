"""A training with Fabric: accumulation, clipping and a reduced validation loss."""

import os

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def tensors(size, seed):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def main():
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.manual_seed(4 + fabric.global_rank)
    with fabric.rank_zero_first():
        train, held_out = tensors(64, 1), tensors(16, 2)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    loader, held_out = DataLoader(train, 4, shuffle=True), DataLoader(held_out, 4)
    loader, held_out = fabric.setup_dataloaders(loader, held_out)
    for epoch in range(2):
        model.train()
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            done = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not done):
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if done:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            sums = [torch.tensor([F.cross_entropy(model(x), y, reduction="sum"), len(y)]) for x, y in held_out]
        total = fabric.all_reduce(torch.stack(sums).sum(0), reduce_op="sum")
        fabric.print("validation", (total[0] / total[1]).item())
        fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    if dist.is_initialized():
        dist.destroy_process_group()
