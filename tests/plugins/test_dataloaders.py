"""What a dataloader, its sampler and its generators do after a resume: the same as without an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from positions import COUNT, PER_EPOCH, At, Net, Samples, fit, interrupt
from ranks import results_of_ranks
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from lit_mnist.distributed.rank import Rank
from lit_mnist.plugins.generators import find_generators

pytestmark = pytest.mark.timeout(90)


class Drawing(Sampler[int]):
    """Draws each index when it is needed, between the numbers that the training draws."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            yield int(torch.randint(COUNT, ()))


class Numbered(Drawing):
    """Draws each index from its own generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            yield int(self.generator.integers(COUNT))


class Counting(Drawing):
    """Counts its epochs without a state that others can ask for."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Epochs(Counting):
    """Has the number of the epoch as its state."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Endless(Sampler[int]):
    """Has no length, so that a batch is loaded ahead."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT, generator=self.generator).tolist())


def _shift(worker: int) -> None:
    """Gives each worker other data."""
    info = get_worker_info()
    assert info is not None
    first, second = info.dataset.tensors
    info.dataset.tensors = (first, second + worker)


class Marked(torch.Tensor):
    """A tensor that may do anything when it is indexed."""


def _tensors(first: int = 0, count: int = COUNT) -> TensorDataset:
    return TensorDataset(torch.arange(float(first), first + count), torch.zeros(count))


def _halves() -> Any:
    return ConcatDataset([_tensors(0, COUNT // 2), Subset(_tensors(), range(COUNT // 2, COUNT))])


def _collate(samples: list[Any]) -> Any:
    return default_collate(samples)


# Of these, nothing but the last batch before the save is read again.
READ_ONCE: dict[str, Callable[[torch.Generator], DataLoader[Any]]] = {
    "shuffled": lambda own: DataLoader(_tensors(), 8, shuffle=True, generator=own),
    "in order": lambda own: DataLoader(_tensors(), 8, generator=own),
    "parts": lambda own: DataLoader(_halves(), 8, shuffle=True, generator=own),
    "without a generator": lambda own: DataLoader(_halves(), 8, shuffle=True),
    "weighted": lambda own: DataLoader(
        _tensors(), batch_sampler=BatchSampler(WeightedRandomSampler(range(1, 65), COUNT, generator=own), 8, False)
    ),
    "drawn one by one": lambda own: DataLoader(_tensors(), 8, sampler=Drawing(), generator=own),
    "workers": lambda own: DataLoader(_tensors(), 8, shuffle=True, num_workers=2, generator=own),
    "drawn ahead by workers": lambda _: DataLoader(_tensors(), 8, sampler=Numbered(), num_workers=2),
    "a batch sampler over one of the user's": lambda _: DataLoader(
        _tensors(), batch_sampler=BatchSampler(Drawing(), 8, False)
    ),
    "an order without a length": lambda own: DataLoader(_tensors(), 8, sampler=Endless(own)),
    "an order without a length, workers": lambda own: DataLoader(_tensors(), 8, sampler=Endless(own), num_workers=2),
    "a number that counts": lambda _: DataLoader(_tensors(), 8, sampler=Counting()),
    "a number that counts, workers": lambda _: DataLoader(_tensors(), 8, sampler=Counting(), num_workers=2),
    "a state within a batch sampler": lambda _: DataLoader(_tensors(), 8, sampler=Epochs()),
}
# Loading a batch of these may have an effect.
READ_AGAIN: dict[str, Callable[[torch.Generator], DataLoader[Any]]] = {
    "a function that collates": lambda own: DataLoader(_tensors(), 8, shuffle=True, collate_fn=_collate, generator=own),
    "a class of tensors": lambda own: DataLoader(
        TensorDataset(torch.arange(float(COUNT)).as_subclass(Marked), torch.zeros(COUNT)), 8, generator=own
    ),
    "persistent workers": lambda own: DataLoader(
        _tensors(), 8, shuffle=True, num_workers=2, persistent_workers=True, generator=own
    ),
    "workers with different data": lambda own: DataLoader(
        _tensors(), 8, shuffle=True, num_workers=2, worker_init_fn=_shift, generator=own
    ),
}


@pytest.mark.parametrize("name", [*READ_ONCE, *READ_AGAIN])
def test_what_only_reads_tensors_is_not_read_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read, shared = {**READ_ONCE, **READ_AGAIN}[name], list[int](), torch.Generator()
    original = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda data, index: read.append(index) or original(data, index))

    is_shared = any(each is shared for _, each in find_generators(make(shared)))

    class Drawn(Net):
        """Draws from the generator of its dataloader in each step."""

        def __init__(self) -> None:
            # The module does not refer to it, but the dataloader does.
            shared.manual_seed(5)
            super().__init__(lambda: make(shared))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            # Where the dataloader has it too.
            generator = shared if is_shared else None
            return super().training_step(batch, batch_idx) * float(1 + torch.rand((), generator=generator))

    def run(folder: str, *callbacks: Callback) -> Net:
        return fit(tmp_path / folder, None, *callbacks, module=Drawn)[0]

    whole = run("whole")
    for step in (1, 4, PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 5):
        run(str(step), At(step + 1, interrupt))
        read.clear()
        resumed = run(str(step))
        assert resumed.seen == whole.seen
        assert torch.equal(resumed.net.weight, whole.net.weight)
        if "workers" not in name:
            used = step % PER_EPOCH
            again = min(used, 1) if name in READ_ONCE else used
            assert len(read) == 8 * (3 * PER_EPOCH - step + again)


@pytest.mark.parametrize("sampler", [Counting, Epochs])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_longer_training_continues_the_epochs_of_a_sampler(workers: int, sampler: Any, tmp_path: Path) -> None:
    def run(folder: str, epochs: int) -> Net:
        def module() -> Net:
            return Net(lambda: DataLoader(_tensors(), 8, sampler=sampler(), num_workers=workers))

        return fit(tmp_path / folder, None, module=module, max_epochs=epochs)[0]

    run("run", 2)
    assert run("run", 4).seen == run("whole", 4).seen


@pytest.mark.parametrize("sampler", [Counting, Epochs])
def test_a_sampler_that_lightning_splits_has_its_state(sampler: Any, tmp_path: Path) -> None:
    def work(rank: Rank) -> Any:
        def run(folder: str, *callbacks: Callback) -> Any:
            def module() -> Net:
                return Net(lambda: DataLoader(_tensors(), 4, sampler=sampler()))

            options = {"use_distributed_sampler": True, "ranks": rank.world_size}
            return fit(tmp_path / folder, None, *callbacks, module=module, **options)[0].seen

        whole = run("whole")
        for step in (3, PER_EPOCH, PER_EPOCH + 5):
            run(str(step), At(step + 1, interrupt))
            assert run(str(step)) == whole
        return whole

    first, second = results_of_ranks(work, tmp_path / "ranks", 2)
    assert first[0] != first[PER_EPOCH] != second[PER_EPOCH]


@pytest.mark.parametrize(("every", "validates"), [(1, 1), (2, 1), (2, 2), (3, 1), (0, 1), (0, 2)])
def test_loaders_are_reloaded_as_without_an_interruption(every: int, validates: int, tmp_path: Path) -> None:
    class Noisy(Samples):
        """Draws from its own generator."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def __getitem__(self, index: int) -> Any:
            return float(index), float(torch.rand((), generator=self.generator))

    class Reloaded(Net):
        """Has another order in each epoch in which its loaders are set up, and logs what it validates."""

        def __init__(self) -> None:
            super().__init__()
            self.validated = list[float]()

        def train_dataloader(self) -> Any:
            epoch = self.current_epoch if every else 0
            generator = torch.Generator().manual_seed(epoch)
            return DataLoader(Samples(), 8 if epoch < 2 else 4, shuffle=True, generator=generator)

        def val_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(self.current_epoch if every else 0)
            return DataLoader(Noisy(), 32, shuffle=True, generator=generator)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(float(batch[1].sum()))

    def run(folder: str, *callbacks: Callback) -> Reloaded:
        options = {"reload_dataloaders_every_n_epochs": every, "check_val_every_n_epoch": validates, "max_epochs": 5}
        module, _ = fit(tmp_path / folder, None, *callbacks, module=Reloaded, num_sanity_val_steps=0, **options)
        assert isinstance(module, Reloaded)
        return module

    whole = run("whole")
    for step in (3, PER_EPOCH, PER_EPOCH + 5, 2 * PER_EPOCH + 3, 3 * PER_EPOCH + 12):
        run(str(step), At(step + 1, interrupt))
        resumed = run(str(step))
        assert resumed.seen == whole.seen
        assert resumed.validated == whole.validated
        assert torch.equal(resumed.net.weight, whole.net.weight)
