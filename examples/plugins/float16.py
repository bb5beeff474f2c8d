"""Float16OnCPU: float16 with a GradScaler, where `precision="16-mixed"` would compute in bfloat16."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.plugins import Float16OnCPU


def main(devices: int = 1) -> None:
    """Trains two epochs."""
    plugin = Float16OnCPU(init_scale=2.0**20)
    trainer = Trainer(**options(devices), plugins=[plugin], enable_checkpointing=False)
    trainer.fit(Classifier(), DataLoader(points(1024, seed=1), batch_size=64, shuffle=True))
    print(f"the scale is now {plugin.scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
