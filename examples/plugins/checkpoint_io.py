"""VerifiedCheckpointIO: checkpoints with a SHA-256, written atomically in the background."""

from __future__ import annotations

import tempfile

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.errors import InputError
from lit_mnist.plugins import VerifiedCheckpointIO


def main(devices: int = 1) -> None:
    """Trains two epochs, damages the checkpoint, and fails to load it."""
    with tempfile.TemporaryDirectory() as folder:
        callback = ModelCheckpoint(dirpath=folder, save_last=True)
        trainer = Trainer(**options(devices), plugins=[VerifiedCheckpointIO()], callbacks=[callback])
        trainer.fit(Classifier(), DataLoader(points(1024, seed=1), batch_size=64))
        with open(callback.last_model_path, "r+b") as file:  # noqa: PTH123
            file.seek(2000)
            flipped = file.read(1)[0] ^ 1
            file.seek(2000)
            file.write(bytes([flipped]))
        try:
            trainer.strategy.load_checkpoint(callback.last_model_path)
        except InputError as error:
            print(f"rejected: {error}")


if __name__ == "__main__":
    main()
