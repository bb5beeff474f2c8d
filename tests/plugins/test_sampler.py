"""Which samples each rank uses does not depend on the number of ranks, also after a resume on another number."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import results_of_ranks, stock_trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactDistributedSampler

WORLD_SIZES = st.sampled_from([1, 2, 3, 4, 6, 12])


def of_ranks(count: int, world_size: int, **options: Any) -> list[ExactDistributedSampler]:
    return [
        ExactDistributedSampler(count, 12, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]


def global_batches(samplers: list[ExactDistributedSampler], batches: int | None = None) -> list[list[int]]:
    found = []
    iterators = [iter(sampler) for sampler in samplers]
    while batches is None or len(found) < batches:
        parts = [next(iterator, None) for iterator in iterators]
        if parts[0] is None:
            break
        found.append([index for part in parts for index in part or ()])
    return found


@settings(deadline=None)
@given(st.integers(12, 200), st.integers(0, 2**40), st.integers(0, 5), WORLD_SIZES, WORLD_SIZES, st.data())
def test_a_resumed_epoch_continues_on_another_number_of_ranks(
    count: int, seed: int, epoch: int, before: int, after: int, data: st.DataObject
) -> None:
    whole = of_ranks(count, 1, seed=seed)
    whole[0].set_epoch(epoch)
    epochs = global_batches(whole)
    whole[0].set_epoch(epoch + 1)
    epochs += global_batches(whole)
    assert sorted(epochs[0]) == sorted(set(epochs[0]))
    used = data.draw(st.integers(0, count // 12))

    first = of_ranks(count, before, seed=seed)
    for sampler in first:
        sampler.set_epoch(epoch)
    assert global_batches(first, used) == epochs[:used]
    states = [sampler.state_dict() for sampler in first]
    assert all(state == states[0] for state in states)

    resumed = of_ranks(count, after, seed=seed)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
        # As a Trainer does.
        sampler.set_epoch(states[0]["epoch"])
    rest = epochs[used : count // 12] or epochs[count // 12 :]
    assert global_batches(resumed) == rest
    for sampler in resumed:
        sampler.set_epoch(states[0]["epoch"] + 1)
    if states[0]["epoch"] == epoch:
        assert global_batches(resumed) == epochs[count // 12 :]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 40))
def test_an_evaluation_uses_each_sample_once(count: int, world_size: int, batch_size: int) -> None:
    samplers = [
        ExactDistributedSampler(count, batch_size, rank=rank, world_size=world_size, evaluation=True)
        for rank in range(world_size)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert [index for part in batches for batch in part for index in batch] == list(range(count))
    sizes = [sum(map(len, part)) for part in batches]
    assert max(sizes) - min(sizes) <= 1
    # Lightning leaves out the hooks of a rank without batches, and marks the last batch of the first rank.
    assert len({len(sampler) for sampler in samplers}) == 1
    assert len(samplers[0]) == len(batches[0]) == max(map(len, batches)) >= 1


def test_wrong_use_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    for arguments, options, message in (
        ((iter([1]), 4), {}, "has no length"),
        ((10, 0), {}, "batch_size must be at least 1"),
        ((10, 11), {}, "10 samples do not fill one batch of 11"),
        ((0, 4), {"evaluation": True}, "0 samples do not fill"),
        ((10, 4), {"rank": 1}, "both rank and world_size"),
        ((10, 4), {"rank": 2, "world_size": 2}, "no rank 2 of 2"),
    ):
        with pytest.raises(InputError, match=message):
            ExactDistributedSampler(*arguments, **options)  # type: ignore[arg-type]
    for use in (iter, len):
        with pytest.raises(InputError, match=r"cannot be split evenly over 3 ranks: set batch_size to a multiple of 3"):
            use(ExactDistributedSampler(10, 4, rank=0, world_size=3))
    sampler = ExactDistributedSampler(10, 4)
    with pytest.raises(InputError, match="saved with batch_size 4, but has 5"):
        ExactDistributedSampler(10, 5).load_state_dict(sampler.state_dict())
    with pytest.raises(InputError, match="2 batches, but 3 were given"):
        sampler.state_dict(3)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(3)
    with pytest.raises(InputError, match="set to 3 after batches of epoch 0 had been loaded"):
        next(iterator)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            list(sampler)
    # Once for this sampler, although it was used four times.
    assert caplog.text.count("2 of 10 samples are dropped from each epoch") <= 1


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1).double()
        torch.nn.init.zeros_(self.net.weight)
        torch.nn.init.zeros_(self.net.bias)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(float(batch[0].sum()))
        return torch.nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 0.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Data(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(50, 4, generator=generator, dtype=torch.float64)
        self.data = TensorDataset(inputs, inputs.sum(1))
        self.sampler = ExactDistributedSampler(self.data, 12, seed=5)
        self.workers = workers

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_sampler=self.sampler, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_sampler=ExactDistributedSampler(self.data, 12, evaluation=True))

    predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return self.sampler.state_dict(self.trainer.fit_loop.batch_idx + 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def fit(rank: Rank, folder: Path, workers: int = 0, **options: Any) -> str:
    """Trains three epochs of four batches, saves each step and each epoch, and returns the digest of the weights."""
    resume = options.pop("ckpt_path", None)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = stock_trainer(
        rank.world_size, folder, max_epochs=3, use_distributed_sampler=False, enable_checkpointing=True,
        callbacks=[save, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], num_sanity_val_steps=0, **options,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, datamodule=Data(workers), ckpt_path=resume, weights_only=True if resume else None)
    assert trainer.global_step == 12
    rounded = {name: value.float() for name, value in module.state_dict().items()}
    return weights_sha256(rounded)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stock_trainer_resumes_within_an_epoch_on_another_number_of_ranks(tmp_path: Path, workers: int) -> None:
    def whole(rank: Rank) -> str:
        return fit(rank, tmp_path / str(rank.world_size), workers)

    def resumed(rank: Rank) -> list[str]:
        names = (
            ["step=3", "step=4", "step=5", "step=10", "epoch=0", "epoch=1"] if workers == 0 else ["step=5", "epoch=0"]
        )
        start = tmp_path / str(3 - rank.world_size)
        return [
            fit(rank, tmp_path / "again" / f"{rank.world_size}-{name}", workers, ckpt_path=start / f"{name}.ckpt")
            for name in names
        ]

    found = {n: set(results_of_ranks(whole, tmp_path / f"whole-{n}", n)) for n in (1, 2)}
    assert found[1] == found[2]
    for n in (1, 2):
        for rank in results_of_ranks(resumed, tmp_path / f"resumed-{n}", n):
            assert set(rank) == found[1]


def test_a_prediction_uses_each_sample_once(tmp_path: Path) -> None:
    def predict(rank: Rank) -> list[float]:
        trainer = stock_trainer(rank.world_size, tmp_path, use_distributed_sampler=False)
        batches: Any = trainer.predict(Net(), datamodule=Data())
        return torch.cat(batches).tolist()

    ranks = results_of_ranks(predict, tmp_path, 3)
    assert sum(ranks, []) == Data().data.tensors[1].tolist()  # noqa: RUF017


def test_forgetting_to_switch_lightnings_sampler_off_is_an_error(tmp_path: Path) -> None:
    def work(rank: Rank) -> str:
        trainer = stock_trainer(rank.world_size, tmp_path, max_epochs=1)
        with pytest.raises(TypeError, match="use_distributed_sampler=False"):
            trainer.fit(Net(), datamodule=Data())
        return "rejected"

    assert results_of_ranks(work, tmp_path, 2) == ["rejected"] * 2


def test_it_is_rejected_as_the_sampler_of_a_loader() -> None:
    data = TensorDataset(torch.arange(12.0))
    sampler = ExactDistributedSampler(data, 4, rank=0, world_size=1)
    assert len(list(DataLoader(data, batch_sampler=sampler))) == 3
    with pytest.raises(InputError, match="pass it to the DataLoader as batch_sampler"):
        list(DataLoader(data, 4, sampler=sampler))
