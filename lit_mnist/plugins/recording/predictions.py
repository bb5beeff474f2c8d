"""Writes what `predict_step` has returned on all ranks to one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.distributed.gather import all_gather_bytes
from lit_mnist.distributed.terminal import display_path, print_labelled, print_line
from lit_mnist.errors import InputError
from lit_mnist.plugins.plain_values import NotPlainError, pack, unpack

PREDICTIONS = "predictions.pt"


class WritePredictions(BasePredictionWriter):
    """Writes the predictions of all ranks to one file.

    `torch.load("predictions.pt")` returns a list with a dict for each batch: `indices`, the samples of the batch (empty
    for an IterableDataset), `dataloader`, and `output`, what `predict_step` has returned.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.path = folder / PREDICTIONS

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Writes the file.

        Raises:
            InputError: An output is neither a tensor nor a plain value.
        """
        # With one dataloader, the predictions are not nested.
        nested = [predictions] if len(batch_indices) == 1 else predictions
        rows = [
            {"dataloader": number, "indices": list(indices or []), "output": output}
            for number, (outputs, own) in enumerate(zip(nested, batch_indices, strict=True))
            for output, indices in zip(outputs, own or [None] * len(outputs), strict=True)
        ]
        try:
            content = pack(rows)
        except NotPlainError as error:
            raise InputError(
                f"predict_step returns a {error}: return tensors, or lists and dicts of tensors and plain values."
            ) from error
        everyone = [unpack(part, torch.device("cpu")) for part in all_gather_bytes(content)]
        if trainer.is_global_zero:
            merged = [row for part in everyone for row in part]
            merged.sort(key=lambda row: (row["dataloader"], row["indices"]))
            with atomic_file(self.path) as file:
                torch.save(merged, file)
            print_line()
            print_labelled("predicted", f"{len(merged)} batches")
            print_labelled("results", display_path(self.path))
            print_labelled("use", f'torch.load("{display_path(self.path)}", weights_only=True)')
