"""The plugins work together: an interrupted training resumes bit-identically with the sampler and verified files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_modules import INPUTS, TARGETS, AutoEncoder
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from ranks import results_of_ranks, stock_trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import (
    ExactCheckpoint,
    ExactDistributedSampler,
    Float16OnCPU,
    PortableSyncBatchNorm,
    VerifiedCheckpointIO,
)


class Fail(Callback):
    """Raises an error in a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("interrupted")


def fit(rank: Rank, folder: Path, workers: int, fail_at: int | None) -> str:
    seed_everything(1, verbose=False)
    module, exact = AutoEncoder(), ExactCheckpoint(folder, every_n_train_steps=1)
    data = TensorDataset(INPUTS, TARGETS)
    loader = DataLoader(data, batch_sampler=ExactDistributedSampler(data, 16, seed=1), num_workers=workers)
    trainer = stock_trainer(
        rank.world_size, folder, max_epochs=2, use_distributed_sampler=False, callbacks=[exact, Fail(fail_at)],
        plugins=[PortableSyncBatchNorm(30), Float16OnCPU(), VerifiedCheckpointIO()], enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=exact.last)
    assert trainer.global_step == 12
    return weights_sha256(module.state_dict())


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_interrupted_training_resumes_bit_identically(tmp_path: Path, world_size: int) -> None:
    def work(rank: Rank) -> list[str]:
        torch.set_num_threads(1)
        found = [fit(rank, tmp_path / "whole", 0, None)]
        for step in (3, 6, 8):
            workers = 2 if step == 8 else 0
            folder = tmp_path / f"after-{step}"
            with pytest.raises(RuntimeError, match="interrupted"):
                fit(rank, folder, workers, step)
            found.append(fit(rank, folder, workers, None))
        return found

    for found in results_of_ranks(work, tmp_path / "ranks", world_size):
        assert len(set(found)) == 1, found


@pytest.mark.parametrize("kind", [PortableSyncBatchNorm, Float16OnCPU, VerifiedCheckpointIO])
def test_a_plugin_among_the_callbacks_is_rejected(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"pass it in Trainer\(plugins=\[{kind.__name__}\(\)\]\)"):
        Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, callbacks=[kind()])
