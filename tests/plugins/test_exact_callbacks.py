"""ExactCheckpoint beside Lightning's own callbacks: a resume is bit-identical, or is rejected with the reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as of_lightning
import pytest
import torch
import torch.nn.functional as F
from foreign_modules import INPUTS, TARGETS
from lightning.pytorch import Callback, LightningModule, seed_everything
from ranks import results_of_ranks, stock_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactCheckpoint

DATA = TensorDataset(INPUTS, TARGETS)


class Classifier(LightningModule):
    """A backbone and a head, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 16
        self.backbone = nn.Linear(16, 8)
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.backbone(batch[0])), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, 32)


class Fail(Callback):
    """Raises an error before a batch, counted over all epochs from 0."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1 == self.batch:
            raise RuntimeError("interrupted")


CALLBACKS: dict[str, Callable[[Path], Callback]] = {
    "weight averaging": lambda _: of_lightning.WeightAveraging(),
    "EMA": lambda _: of_lightning.EMAWeightAveraging(decay=0.9),
    "SWA": lambda _: of_lightning.StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=2),
    "accumulation": lambda _: of_lightning.GradientAccumulationScheduler({0: 1, 1: 2, 3: 3}),
    "timer": lambda _: of_lightning.Timer({"hours": 1}),
    "early stopping": lambda _: of_lightning.EarlyStopping("val_loss", patience=1, min_delta=0.01),
    "best checkpoints": lambda folder: of_lightning.ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2),
}


def fit(
    rank: Rank, folder: Path, callback: Callback, fail_at: int | None = None, *, compiled: bool = False
) -> list[Any]:
    """Trains or resumes, and returns the steps, the learning rates and the weights."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    module, exact = Classifier(), ExactCheckpoint(folder, every_n_train_steps=1)
    trainer = stock_trainer(
        rank.world_size, folder, max_epochs=4, num_sanity_val_steps=0, enable_checkpointing=True,
        callbacks=[callback, exact, Fail(fail_at)],
    )  # fmt: skip
    trainer.fit(torch.compile(module, backend="aot_eager") if compiled else module, ckpt_path=exact.last)  # type: ignore[arg-type]
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    best = [Path(each.best_model_path).name for each in trainer.checkpoint_callbacks if each.best_model_path]
    return [trainer.global_step, trainer.current_epoch, rates, best, weights_sha256(module.state_dict())]


def resumed(rank: Rank, folder: Path, make: Callable[[Path], Callback], **options: bool) -> list[Any]:
    """Returns the end of the uninterrupted training, and of those interrupted in each epoch."""
    ends = [fit(rank, folder / "whole", make(folder / "whole"), **options)]
    for batch in (2, 6 // rank.world_size, 16 // rank.world_size, 22 // rank.world_size):
        again = folder / f"after-{batch}"
        with pytest.raises(RuntimeError, match="interrupted"):
            fit(rank, again, make(again), batch, **options)
        ends.append(fit(rank, again, make(again), **options))
    return ends


QUICK = {"EMA"}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CALLBACKS]
)
def test_a_resume_beside_lightnings_callbacks_is_bit_identical(tmp_path: Path, name: str, world_size: int) -> None:
    def work(rank: Rank) -> list[Any]:
        return resumed(rank, tmp_path / "runs", CALLBACKS[name])

    for ends in results_of_ranks(work, tmp_path / "ranks", world_size):
        assert all(end == ends[0] for end in ends[1:]), ends


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_of_a_compiled_module_is_bit_identical(tmp_path: Path, world_size: int) -> None:
    def work(rank: Rank) -> list[Any]:
        return resumed(rank, tmp_path / "runs", lambda _: Callback(), compiled=True)

    for ends in results_of_ranks(work, tmp_path / "ranks", world_size):
        assert all(end == ends[0] for end in ends[1:]), ends


@pytest.mark.parametrize("kind", ["LearningRateFinder", "BatchSizeFinder", "ModelPruning"])
def test_a_callback_that_prevents_an_exact_resume_is_rejected(tmp_path: Path, kind: str) -> None:
    options = {"pruning_fn": "l1_unstructured"} if kind == "ModelPruning" else {}
    trainer = stock_trainer(
        1, tmp_path, max_epochs=1, enable_checkpointing=True,
        callbacks=[getattr(of_lightning, kind)(**options), ExactCheckpoint(tmp_path)],
    )  # fmt: skip
    with pytest.raises(InputError, match=f"{kind} beside ExactCheckpoint prevents a bit-identical resume, since it"):
        trainer.fit(Classifier())
    assert not list(tmp_path.iterdir())


def test_weights_that_differ_between_the_ranks_are_rejected_and_named(tmp_path: Path) -> None:
    # DDP wraps the module while the backbone is frozen, and never averages its gradients.
    def work(rank: Rank) -> str:
        with pytest.raises(InputError) as error:
            fit(rank, tmp_path / "run", of_lightning.BackboneFinetuning(unfreeze_backbone_at_epoch=2))
        return str(error.value)

    for message in results_of_ranks(work, tmp_path / "ranks", 2):
        assert message.startswith("The weights differ between the ranks")
        assert "backbone.weight, backbone.bias. DDP does not average" in message


FORKING = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_mnist.plugins import ExactCheckpoint


class Logging(BoringModel):
    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)["x"]
        self.log("val_loss", loss, sync_dist=True)


folder, exact_first = sys.argv[1], sys.argv[2] == "True"
best = ModelCheckpoint(folder, "best", monitor="val_loss")
callbacks = [ExactCheckpoint(folder), best] if exact_first else [best, ExactCheckpoint(folder)]
options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}
trainer = Trainer(devices=2, strategy="ddp_fork", callbacks=callbacks, **options)
trainer.fit(Logging())
trainer.validate(Logging(), ckpt_path="best")
assert exact_first or best.best_model_path.endswith("best.ckpt"), best.best_model_path
"""


@pytest.mark.parametrize("exact_first", [False, True])
def test_the_best_checkpoint_is_known_where_the_ranks_were_started(tmp_path: Path, exact_first: bool) -> None:
    """Lightning returns the path of the first checkpoint callback of a rank to the process that has forked it."""
    (tmp_path / "forking.py").write_text(FORKING)
    words = [sys.executable, str(tmp_path / "forking.py"), str(tmp_path / "run"), str(exact_first)]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
