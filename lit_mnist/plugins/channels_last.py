"""The channels-last memory format."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class ChannelsLast(Callback):
    """Converts the weights of two-dimensional convolutions to the channels-last memory format during a stage.

    Without it, convolutions on CPUs, and those in 16 bits on GPUs, take up to twice as long. The images should have the
    same format, which a convolution otherwise converts:

        trainer = Trainer(callbacks=[ChannelsLast()])

    The weights are contiguous in checkpoints and after the end of the stage, as safetensors requires.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Converts the weights."""
        convert_weights(pl_module, torch.channels_last)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Converts the weights back."""
        convert_weights(pl_module, torch.contiguous_format)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Makes the weights of the checkpoint contiguous."""
        for name, value in checkpoint["state_dict"].items():
            if isinstance(value, torch.Tensor):
                checkpoint["state_dict"][name] = value.contiguous()


def convert_weights(module: torch.nn.Module, memory_format: torch.memory_format) -> None:
    """Converts the weights of `Conv2d` in place; `Module.to` rejects modules with other convolutions."""
    for part in module.modules():
        # A subclass may compute with its weight in another shape.
        if type(part) is torch.nn.Conv2d:
            # Not contiguous(), which leaves the strides of a weight with one input channel.
            part.weight.data = part.weight.data.clone(memory_format=memory_format)
