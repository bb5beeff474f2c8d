"""The callbacks for mechanics of a training give the bits of a module that does the same by hand, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from killed_runs import Training, assert_resumes
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy
from ranks import results_of_ranks, stock_trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.buffers import sync_buffers
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import (
    ChannelsLast,
    ExactAccumulation,
    Float16OnCPU,
    SkippedStepSchedule,
    SynchronizedBuffers,
    VerifiedCheckpointIO,
    VerifiedLoading,
)

pytestmark = pytest.mark.timeout(120)

_FIXED = torch.Generator().manual_seed(0)
IMAGES = torch.randn(84, 1, 8, 8, generator=_FIXED)
TARGETS = torch.randint(0, 4, (84,), generator=_FIXED)
DATA = TensorDataset(IMAGES, TARGETS)


class Classifier(LightningModule):
    """As users write it. An epoch has 7 micro-batches on two ranks, and 14 on one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
        self.rates: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self.net(batch[0]).float(), batch[1])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(F.cross_entropy(self.net(batch[0]).float(), batch[1])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, 6, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, 21)


class ByHand(Classifier):
    """The same mechanics in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def setup(self, stage: str) -> None:
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        accumulate, batches = self.trainer.accumulate_grad_batches, self.trainer.num_training_batches
        window = min(accumulate, batches - batch_idx + batch_idx % accumulate)
        return {"loss": loss * (accumulate / window)}

    def configure_optimizers(self) -> Any:
        optimizers, schedules = super().configure_optimizers()
        optimizers[0].register_step_post_hook(self._count)
        return optimizers, schedules

    def _count(self, *_: Any) -> None:
        self.made += 1

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if scheduler.last_epoch < self.made:
            scheduler.step()

    def on_validation_epoch_start(self) -> None:
        sync_buffers(self.net)


PARTS = (ExactAccumulation, SkippedStepSchedule, SynchronizedBuffers, ChannelsLast)


def _train(make: Any, folder: Path, world_size: int, parts: list[Callback]) -> tuple[Any, Trainer]:
    seed_everything(1, verbose=False)
    strategy: Any = DDPStrategy(process_group_backend="gloo", broadcast_buffers=False) if world_size > 1 else "auto"
    trainer = stock_trainer(
        world_size,
        folder,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=3,
        num_sanity_val_steps=0,
        # Overflows several times.
        plugins=[Float16OnCPU(init_scale=2.0**19)],
        callbacks=parts,
    )
    module = make()
    trainer.fit(module)
    return module, trainer


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_callbacks_give_the_bits_of_a_module_that_does_it_by_hand(world_size: int, tmp_path: Path) -> None:
    def work(rank: Rank) -> list[Any]:
        found: list[Any] = []
        for make, parts in ((ByHand, []), (Classifier, [part() for part in PARTS]), (Classifier, [])):
            module, _ = _train(make, tmp_path, world_size, parts)
            found.append([weights_sha256(module.net.state_dict()), module.rates, module.losses])
            for part in parts:
                if isinstance(part, SkippedStepSchedule):
                    found[-1].append(part.optimizer_steps)
        return found

    for by_hand, by_parts, plain in results_of_ranks(work, tmp_path / "ranks", world_size):
        assert by_parts[:3] == by_hand
        assert plain[0] != by_hand[0]
        # An epoch has 3 steps on two ranks, and 5 on one; some of them overflowed.
        assert 0 < by_parts[3] < 2 * {1: 5, 2: 3}[world_size]


def test_a_module_is_restored_after_a_fit_and_after_an_error(tmp_path: Path) -> None:
    module, _ = _train(Classifier, tmp_path, 1, [part() for part in PARTS])
    assert not {"training_step", "lr_scheduler_step"} & vars(module).keys()
    assert module.net[0].weight.is_contiguous()

    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("failed")

    parts: list[Callback] = [part() for part in PARTS]
    trainer = stock_trainer(1, tmp_path, callbacks=parts, num_sanity_val_steps=0)
    failing = Failing()
    with pytest.raises(RuntimeError, match="failed"):
        trainer.fit(failing)
    assert not {"training_step", "lr_scheduler_step"} & vars(failing).keys()


def test_a_killed_training_with_the_callbacks_resumes_bit_identically(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 3, "num_sanity_val_steps": 0, "plugins": [Float16OnCPU(init_scale=2.0**19)]}
    training = Training(Classifier, tmp_path / "run", 2, 1, options, lambda: [part() for part in PARTS])
    done = training.run()
    assert done.code == 0, done.err
    assert "cannot store" not in done.out
    assert_resumes(training, training.results(), [9, 12])


def test_a_loss_that_is_not_finite_makes_the_gradient_not_finite(tmp_path: Path) -> None:
    class Infinite(Classifier):
        grads: torch.Tensor

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] + torch.inf

        def on_after_backward(self) -> None:
            self.grads = self.net[0].weight.grad.clone()

    for parts, finite in ([], True), ([ExactAccumulation()], False):
        trainer = stock_trainer(1, tmp_path, max_steps=1, num_sanity_val_steps=0, callbacks=parts)
        module = Infinite()
        trainer.fit(module)
        assert bool(module.grads.isfinite().all()) == finite


@pytest.mark.parametrize("limit", [None, 7])
def test_a_loader_whose_last_window_is_unknown_is_rejected(tmp_path: Path, limit: int | None) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.ones(10, 1, 2))

    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"limit_train_batches": limit} if limit else {}
    trainer = stock_trainer(
        1, tmp_path, max_epochs=1, callbacks=[ExactAccumulation()], accumulate_grad_batches=4, **options
    )
    loader = DataLoader(Stream(), batch_size=None)
    if limit:
        trainer.fit(Plain(), loader)
        assert trainer.global_step == 2
        return
    with pytest.raises(InputError, match="the last accumulation window of an epoch is unknown"):
        trainer.fit(Plain(), loader)


def test_channels_last_leaves_weights_of_other_dimensions(tmp_path: Path) -> None:
    class Volumes(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.ModuleList([torch.nn.Conv3d(2, 2, 3), torch.nn.Conv2d(2, 2, 3)])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.net[0].weight.is_contiguous()
            assert self.net[1].weight.is_contiguous(memory_format=torch.channels_last)
            return self.net[0](torch.ones(1, 2, 3, 3, 3)).sum() + self.net[1](torch.ones(1, 2, 3, 3)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Volumes()
    stock_trainer(1, tmp_path, max_steps=1, callbacks=[ChannelsLast()]).fit(module, DataLoader([0]))  # type: ignore[arg-type]
    assert all(parameter.is_contiguous() for parameter in module.parameters())


def test_the_number_of_steps_and_contiguous_weights_are_in_the_checkpoint(tmp_path: Path) -> None:
    schedule = SkippedStepSchedule()
    _, trainer = _train(Classifier, tmp_path, 1, [schedule, ChannelsLast()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["steps_made"] == schedule.optimizer_steps < trainer.global_step
    assert all(value.is_contiguous() for value in saved["state_dict"].values())
    again = SkippedStepSchedule()
    resumed = stock_trainer(1, tmp_path, max_epochs=3, num_sanity_val_steps=0, callbacks=[again])
    resumed.fit(Classifier(), ckpt_path=tmp_path / "a.ckpt")
    assert again.optimizer_steps == schedule.optimizer_steps + 14


def test_a_module_is_loaded_verified(tmp_path: Path) -> None:
    class Verified(VerifiedLoading, Classifier):
        pass

    folder = tmp_path / "run" / "checkpoints"
    trainer = stock_trainer(1, tmp_path, max_steps=1, plugins=[VerifiedCheckpointIO(), DoublePrecision()])
    module = Verified()
    trainer.fit(module)
    trainer.save_checkpoint(folder / "best.ckpt")
    for place in (tmp_path / "run", folder / "best.ckpt"):
        loaded = Verified.load_from_checkpoint(place)
        assert torch.equal(loaded.net[0].weight, module.net[0].weight.float())
    with pytest.raises(InputError, match="never executes code"):
        Verified.load_from_checkpoint(folder / "best.ckpt", weights_only=False)
    content = bytearray((folder / "best.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "best.ckpt").write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        Verified.load_from_checkpoint(folder / "best.ckpt")
