"""The position of a sampler or loader: applied once on resume, verified, and recorded as ended where an epoch ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import SignalAt, Training
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from positions import COUNT, PER_EPOCH, At, Data, Net, Samples, fit, interrupt
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactDistributedSampler

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("workers", "draws", "by_number"),
    [
        pytest.param(*case, marks=() if case in {(2, False, True)} else pytest.mark.slow)
        for case in product((0, 2), (False, True), (False, True))
    ],
)
def test_a_sampler_that_a_data_module_restores_is_moved_once(
    workers: int, draws: bool, by_number: bool, tmp_path: Path
) -> None:
    def data() -> Data:
        return Data(Samples(draws), workers, by_number=by_number)

    whole, _ = fit(tmp_path / "whole", data())
    for step in (1, 3, PER_EPOCH, PER_EPOCH + 5) if workers == 0 else (3, PER_EPOCH + 5):
        fit(tmp_path / str(step), data(), At(step + 1, interrupt))
        again = data()
        resumed, _ = fit(tmp_path / str(step), again)
        assert resumed.seen == whole.seen
        assert torch.equal(resumed.net.weight, whole.net.weight)
        if workers == 0:
            # The sampler was asked to seek: of the batches before the save, only the last one is loaded again.
            left = (3 * PER_EPOCH - step + (step % PER_EPOCH > 0)) * COUNT // PER_EPOCH
            assert again.dataset.loaded == left


class Remembering(Sampler[list[int]]):
    """A batch sampler with a state, as many projects have one."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[list[int]]:
        while self.position < PER_EPOCH:
            self.position += 1
            yield list(range(8 * self.position - 8, 8 * self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Resuming(Data):
    """Restores the state of its own sampler."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.sampler = Remembering()  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()


class Restarting(Remembering):
    """Hides its state."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Misleading(Resuming):
    """Moves a sampler that ExactCheckpoint does not know to have a position."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.sampler = Restarting()  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.sampler.position}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.position = state["position"]  # type: ignore[attr-defined]


def test_a_samplers_own_state_is_applied_once_and_an_unknown_one_is_found_by_the_indices(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", Resuming(Samples(True)))
    fit(tmp_path / "run", Resuming(Samples(True)), At(4, interrupt))
    assert fit(tmp_path / "run", Resuming(Samples(True)))[0].seen == whole.seen
    fit(tmp_path / "unknown", Misleading(Samples(True)), At(4, interrupt))
    with pytest.raises(InputError, match="up to batch 3 of the epoch, the sampler gives other indices than before"):
        fit(tmp_path / "unknown", Misleading(Samples(True)))


class Other(Samples):
    def __getitem__(self, index: int) -> Any:
        first, noise = super().__getitem__(index)
        return first, noise + 1.0


class Fewer(Samples):
    def __len__(self) -> int:
        return COUNT - 8


@pytest.mark.parametrize("draws", [False, True])
def test_other_contents_are_found_after_a_seek_and_in_a_replay(draws: bool, tmp_path: Path) -> None:
    def plain(dataset: Any) -> Any:
        data = Data(dataset)
        data.train_dataloader = lambda: DataLoader(dataset, 8, shuffle=True)  # type: ignore[method-assign]
        data.state_dict = dict  # type: ignore[method-assign]
        return data

    for name, make in (("seek", Data), ("replay", plain)):
        fit(tmp_path / name, make(Samples(draws)), At(4, interrupt))
        with pytest.raises(InputError, match="a different batch 3 with the same indices than before"):
            fit(tmp_path / name, make(Other(draws)))
    with pytest.raises(InputError, match="now has 7 batches instead of 8"):
        fit(tmp_path / "replay", plain(Fewer(draws)))


def _stateful(sampler: Any) -> Callable[[], Any]:
    dataset = TensorDataset(torch.arange(float(COUNT)), torch.zeros(COUNT))
    return lambda: StatefulDataLoader(dataset, batch_sampler=BatchSampler(sampler(dataset), 8, False))


class Silent:
    """A loader whose empty state only keeps Lightning from warning."""

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, COUNT, 8):
            yield torch.arange(first, first + 8), torch.rand(8)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler that draws from the process": _stateful(RandomSampler),
    "a sampler without random numbers": _stateful(SequentialSampler),
    "an empty state": Silent,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_is_used_only_if_it_has_the_position(name: str, tmp_path: Path) -> None:
    training = Training(lambda: Net(LOADERS[name]), tmp_path / "run")
    reference = training.complete()
    for batch in (5, 12):
        (training.folder / "last.ckpt").unlink()
        training.run(stop=SignalAt(batch, signal.SIGTERM))
        assert training.complete() == reference


def test_a_loader_without_an_order_is_rejected(tmp_path: Path) -> None:
    training = Training(lambda: Net(lambda: DataLoader(Samples(), 8, num_workers=2, in_order=False)), tmp_path / "run")
    done = training.run()
    assert done.code == InputError.exit_code, done.err
    assert "in_order=False" in done.err


def _stop(trainer: Any) -> None:
    trainer.should_stop = True


def _use_up(trainer: Any) -> None:
    timer = next(each for each in trainer.callbacks if isinstance(each, Timer))
    timer.load_state_dict({"time_elapsed": {**timer.state_dict()["time_elapsed"], "train": 7200.0}})


# How the first or second epoch ends after some of its batches, the callback that ends it, and the raised limits.
ENDS: dict[str, tuple[dict[str, Any], list[int], Any, dict[str, Any]]] = {
    "limit_train_batches=5": ({"limit_train_batches": 5, "max_epochs": 2}, [5, 5], None, {}),
    "limit_train_batches=0.5": ({"limit_train_batches": 0.5, "max_epochs": 2}, [4, 4], None, {}),
    "should_stop": ({}, [8, 3], _stop, {"max_epochs": 4}),
    "max_time": ({"max_time": timedelta(hours=1)}, [8, 3], _use_up, {"max_time": timedelta(days=9)}),
    "max_steps": ({"max_steps": 11, "max_epochs": -1}, [8, 3], None, {"max_steps": 19}),
    "max_steps at the end of an epoch": ({"max_steps": 16, "max_epochs": -1}, [8, 8], None, {"max_steps": 24}),
}


def _counts(module: Net) -> list[int]:
    epochs = [epoch for epoch, _ in module.seen]
    return [epochs.count(epoch) for epoch in sorted(set(epochs))]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ENDS)
def test_an_epoch_that_ended_early_has_ended(name: str, workers: int, tmp_path: Path) -> None:
    options, counts, work, raised = ENDS[name]
    ends = [At(11, work)] if work else []
    first, _ = fit(tmp_path / "run", Data(Samples(True), workers), *ends, **options)
    assert _counts(first) == counts
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["Data"]
    assert (saved["epoch"], saved["batch"]) == (2, 0)
    # With the same limits, nothing is trained.
    again, _ = fit(tmp_path / "run", Data(Samples(True), workers), **options)
    assert not again.seen
    assert torch.equal(again.net.weight, first.net.weight)
    # With raised ones, the next epoch is trained from its first batch.
    more, _ = fit(tmp_path / "run", Data(Samples(True), workers), **{**options, "max_epochs": 3, **raised})
    assert _counts(more)[:2] == counts
    expected = [[2, indices] for indices in _order_of(2)]
    assert [each for each in more.seen if each[0] == 2] == expected[: _counts(more)[2]]
    assert _counts(more)[2] == (counts[1] if "limit" in name else PER_EPOCH)


def _order_of(epoch: int) -> list[list[int]]:
    sampler = ExactDistributedSampler(COUNT, COUNT // PER_EPOCH, seed=1)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_raised_number_of_steps_continues_as_if_it_had_been_so_from_the_start(tmp_path: Path) -> None:
    limits = {"max_epochs": -1, "accumulate_grad_batches": 2}
    whole, _ = fit(tmp_path / "whole", Data(Samples(True)), max_steps=12, **limits)
    fit(tmp_path / "run", Data(Samples(True)), max_steps=8, **limits)
    more, _ = fit(tmp_path / "run", Data(Samples(True)), max_steps=12, **limits)
    assert more.seen == whole.seen
    assert torch.equal(more.net.weight, whole.net.weight)


class Scheduled(Net):
    """Asks for the number of steps, which sets up the dataloaders before the fit starts."""

    state_is_step: bool

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        assert self.trainer.estimated_stepping_batches > 0
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append([self.current_epoch, batch[0].int().tolist()])
        loss: torch.Tensor = self.net((batch[0] / COUNT).float().unsqueeze(1)).square().mean()
        return loss


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("steps", [pytest.param(8, marks=pytest.mark.slow), 11, 16])
def test_an_ended_training_resumes_if_the_module_asks_for_the_number_of_steps(
    steps: int, declared: bool, tmp_path: Path
) -> None:
    def module() -> Net:
        made = Scheduled()
        made.state_is_step = declared
        return made

    limits = {"max_epochs": -1}
    whole, _ = fit(tmp_path / "whole", Data(Samples()), module=module, max_steps=24, **limits)
    first, _ = fit(tmp_path / "run", Data(Samples()), module=module, max_steps=steps, **limits)
    again, _ = fit(tmp_path / "run", Data(Samples()), module=module, max_steps=steps, **limits)
    assert not again.seen
    assert torch.equal(again.net.weight, first.net.weight)
    more, _ = fit(tmp_path / "run", Data(Samples()), module=module, max_steps=24, **limits)
    assert _counts(more)[-1] == (8 if steps != 11 else 5)
    if steps % PER_EPOCH == 0:
        assert torch.equal(more.net.weight, whole.net.weight)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_trainer_resumes_after_epochs_that_ended_early(workers: int, tmp_path: Path) -> None:
    """From each checkpoint: within an epoch, at the end of its last batch, of its validation, and of the epoch."""
    options: dict[str, Any] = {"limit_train_batches": 5, "exact": False}

    def saves(folder: Path) -> list[Callback]:
        return [
            ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ]

    whole, _ = fit(tmp_path / "whole", Data(Samples(), workers), *saves(tmp_path / "whole"), **options)
    assert _counts(whole) == [5, 5, 5]
    for name, used in ("step=3", 3), ("step=5", 5), ("epoch=0", 5), ("step=7", 7), ("epoch=1", 10):
        path = tmp_path / "whole" / f"{name}.ckpt"
        resumed, _ = fit(tmp_path / name, Data(Samples(), workers), ckpt_path=path, **options)
        assert resumed.seen == whole.seen[used:], name


def test_a_position_that_was_saved_by_number_is_not_used_silently(tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit_train_batches": 5, "exact": False}
    save = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(tmp_path, Data(Samples(), 2, by_number=True), save, **options)
    with pytest.raises(InputError, match=r"Save the position with state_dict\(trainer=trainer\)"):
        fit(tmp_path, Data(Samples(), 2, by_number=True), ckpt_path=tmp_path / "epoch=0.ckpt", **options)
