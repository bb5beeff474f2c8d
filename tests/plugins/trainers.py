"""Trainers for tests that compare a LitTrainer with a stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


def bare_trainer(kind: type[Trainer], folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """Returns a Trainer of one rank on a CPU that shows and writes nothing."""
    return kind(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
