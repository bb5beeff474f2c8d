"""Ranks that use a stock Trainer, forked from this process, which has imported Lightning already."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from processes import on_ranks

from lit_mnist.distributed.rank import Rank


def stock_trainer(world_size: int, folder: Path, **options: Any) -> Trainer:
    """Returns Lightning's own Trainer on CPUs, which logs and saves nothing by default."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        **{
            "strategy": "ddp_find_unused_parameters_true" if world_size > 1 else "auto",
            "default_root_dir": folder,
            "enable_checkpointing": False,
            **quiet,
            **options,
        },
    )


def results_of_ranks(work: Callable[[Rank], Any], folder: Path, world_size: int) -> list[Any]:
    """Runs `work` on each rank, and returns what it returned, through JSON."""
    folder.mkdir(parents=True, exist_ok=True)

    def save(rank: Rank) -> None:
        warnings.filterwarnings("ignore", message=".*")
        (folder / f"{rank.rank}.json").write_text(json.dumps(work(rank)))

    on_ranks(save, folder, world_size)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
