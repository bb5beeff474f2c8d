"""PortableSyncBatchNorm: batch norm over all ranks, on CPUs too."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.plugins import PortableSyncBatchNorm


def main(devices: int = 2) -> None:
    """Trains two epochs."""
    module = Classifier()
    trainer = Trainer(**options(devices), plugins=[PortableSyncBatchNorm()], enable_checkpointing=False)
    trainer.fit(module, DataLoader(points(1024, seed=1), batch_size=32, shuffle=True))
    # Equal on all ranks; without the plugin, each rank has the statistics of its own samples.
    print(f"rank {trainer.global_rank}: running mean {module.net[1].running_mean[:3].tolist()}")


if __name__ == "__main__":
    main()
