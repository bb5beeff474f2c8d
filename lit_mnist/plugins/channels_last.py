"""The channels-last memory format."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class ChannelsLast(Callback):
    """Converts the weights of convolutions to the channels-last memory format, in which they are faster.

    Checkpoints have contiguous weights, and so has the module after the end of a stage, as safetensors requires:

        trainer = Trainer(callbacks=[ChannelsLast()])

    Networks with 3-d convolutions have another format, and are not supported.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Converts the weights."""
        pl_module.to(memory_format=torch.channels_last)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Converts the weights back."""
        pl_module.to(memory_format=torch.contiguous_format)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Makes the weights of the checkpoint contiguous."""
        checkpoint["state_dict"] = {
            name: value.contiguous() if isinstance(value, torch.Tensor) else value
            for name, value in checkpoint["state_dict"].items()
        }
