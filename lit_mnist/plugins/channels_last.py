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

    Three-dimensional convolutions keep theirs.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Converts the weights."""
        _convert(pl_module, torch.channels_last)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Converts the weights back."""
        _convert(pl_module, torch.contiguous_format)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Makes the weights of the checkpoint contiguous."""
        checkpoint["state_dict"] = {
            name: value.contiguous() if isinstance(value, torch.Tensor) else value
            for name, value in checkpoint["state_dict"].items()
        }


def _convert(module: torch.nn.Module, memory_format: torch.memory_format) -> None:
    for values in (*module.parameters(), *module.buffers()):
        # The format has four dimensions.
        if values.dim() == 4:
            values.data = values.data.to(values.device, memory_format=memory_format)
