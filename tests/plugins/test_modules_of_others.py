"""Each plugin works alone, and with the others, under a stock Trainer with modules that know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_modules import INPUTS, MODULES, TARGETS, TOKENS
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import results_of_ranks, stock_trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.sync_batch_norm import BatchNormOverRanks
from lit_mnist.plugins import (
    ExactDistributedSampler,
    Float16OnCPU,
    PortableSyncBatchNorm,
    VerifiedCheckpointIO,
)


def fit(kind: str, rank: Rank, folder: Path, *, sampler: bool = False, plugins: list[Any]) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    module = MODULES[kind]()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])
    trainer = stock_trainer(
        rank.world_size, folder, max_epochs=2, plugins=plugins, use_distributed_sampler=not sampler,
        enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, "last")], num_sanity_val_steps=1,
    )  # fmt: skip
    loaders: dict[str, Any] = {}
    if sampler and kind != "iterable data set":
        data: Any = TOKENS if kind == "transformer" else TensorDataset(INPUTS, TARGETS)
        loaders["train_dataloaders"] = DataLoader(data, batch_sampler=ExactDistributedSampler(data, 16, seed=1))
        loaders["val_dataloaders"] = DataLoader(data, batch_sampler=ExactDistributedSampler(data, 16, evaluation=True))
    trainer.fit(module, **loaders)
    after = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    assert bool(after.isfinite().all())
    assert not torch.equal(before, after)
    assert not any(isinstance(layer, BatchNormOverRanks) for layer in module.modules())
    assert {type(layer) for layer in module.modules()} == {type(layer) for layer in MODULES[kind]().modules()}
    return {"steps": trainer.global_step, "weights": after.double().sum().item()}


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, ("gan", "transformer")),
        *(pytest.param(world_size, tuple(MODULES), marks=pytest.mark.slow) for world_size in (1, 2)),
    ],
    ids=["2 ranks, two modules", "1 rank", "2 ranks"],
)
def test_each_plugin_trains_each_module(tmp_path: Path, world_size: int, kinds: tuple[str, ...]) -> None:
    def work(rank: Rank) -> dict[str, Any]:
        found = {}
        for kind in kinds:
            for name, options in {
                "none": {"plugins": []},
                "sampler": {"plugins": [], "sampler": True},
                "batch norm": {"plugins": [PortableSyncBatchNorm(30)]},
                "float16": {"plugins": [Float16OnCPU()]},
                "checkpoint": {"plugins": [VerifiedCheckpointIO()]},
                "all": {
                    "plugins": [PortableSyncBatchNorm(30), Float16OnCPU(), VerifiedCheckpointIO()],
                    "sampler": True,
                },
            }.items():
                folder = tmp_path / kind / name
                found[f"{kind}, {name}"] = fit(kind, rank, folder, **options)  # type: ignore[arg-type]
                if name in {"checkpoint", "all"}:
                    # Rank 0 has written the file when its fit ends.
                    dist.barrier()
                    saved = VerifiedCheckpointIO().load_checkpoint(folder / "last.ckpt")
                    assert saved["global_step"] == found[f"{kind}, {name}"]["steps"]
        return found

    ranks = results_of_ranks(work, tmp_path / "ranks", world_size)
    assert all(rank == ranks[0] for rank in ranks)
    for kind in kinds:
        # What a plugin is not for, it does not change.
        plain = ranks[0][f"{kind}, none"]
        assert ranks[0][f"{kind}, checkpoint"] == plain
        if world_size == 1 or kind in {"transformer", "two optimizers"}:
            assert ranks[0][f"{kind}, batch norm"] == plain
        else:
            assert ranks[0][f"{kind}, batch norm"] != plain
        assert ranks[0][f"{kind}, float16"]["weights"] != plain["weights"]
