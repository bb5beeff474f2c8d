"""ExactCheckpoint: stop this with Ctrl-C, or kill it, and start it again: it ends with the same weights."""

from __future__ import annotations

import sys

from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.plugins import ExactCheckpoint


def main(folder: str, devices: int = 1) -> None:
    """Trains two epochs, or resumes them from the checkpoint in a folder."""
    seed_everything(1, verbose=False)
    exact = ExactCheckpoint(folder, every_n_train_steps=10)
    trainer = Trainer(**options(devices), callbacks=[exact])
    module = Classifier()
    trainer.fit(module, DataLoader(points(1024, seed=1), batch_size=16, shuffle=True), ckpt_path=exact.last)
    print(f"step {trainer.global_step}: the weights sum up to {module.net[0].bias.double().sum().item():.15f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
