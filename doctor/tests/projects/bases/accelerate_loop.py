"""A loop with accelerate: gathered metrics of each sample once, and a scheduler that steps once per optimizer step."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, (x[:, :6].sum(1) > 0).float())


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    loader = DataLoader(make_dataset(96, seed=1), batch_size=8, shuffle=True)
    val_loader = DataLoader(make_dataset(25, seed=2), batch_size=8)
    model, optimizer, loader, val_loader = accelerator.prepare(model, optimizer, loader, val_loader)
    for epoch in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.binary_cross_entropy_with_logits(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
        model.eval()
        hits = []
        with torch.no_grad():
            for x, y in val_loader:
                # Drops the samples that were repeated to fill the last batch.
                hits.append(accelerator.gather_for_metrics((model(x) > 0) == (y > 0)))
        accuracy = torch.cat(hits).float().mean()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f} of {len(torch.cat(hits))} samples")
    accelerator.wait_for_everyone()
    model, optimizer, loader, val_loader = accelerator.free_memory(model, optimizer, loader, val_loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
