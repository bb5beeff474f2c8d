"""The data: verified files, the order of the samples, the augmentation."""

import gzip
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lit_mnist.errors import InputError
from lit_mnist.mnist import FILES, Digits, Split, load, whole_batch
from lit_mnist.models import SeededDropout, make_net, seed_dropout
from lit_mnist.order import uniform, validation_split
from lit_mnist.plugins import ExactDistributedSampler


@pytest.fixture(scope="module")
def split() -> Split:
    return load().train


def epochs(count: int, batch: int, seed: int, ranks: int, first: int = 0) -> list[list[list[int]]]:
    """Returns the samples of each step of two epochs, in the order of the ranks."""
    parts = []
    for rank in range(ranks):
        sampler = ExactDistributedSampler(range(count), batch, seed, rank=rank, world_size=ranks)
        steps = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            sampler.start = first if epoch == 0 else 0
            steps.append(list(sampler))
        parts.append(steps)
    return [[sum(rows, []) for rows in zip(*part, strict=True)] for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_samples_of_a_step_depend_on_seed_and_step_alone(ranks: int) -> None:
    whole = epochs(100, 12, 1, 1)
    assert epochs(100, 12, 1, ranks) == whole
    assert epochs(100, 12, 1, ranks, first=3) == [whole[0][3:], whole[1]]
    assert epochs(100, 12, 2, 1) != whole


def taken(samplers: Sequence[ExactDistributedSampler]) -> list[list[int]]:
    return [sum(sampler, []) for sampler in samplers]


def test_a_sampler_that_is_made_before_the_ranks_join_divides_the_samples(ranks: Callable[..., list[Any]]) -> None:
    made = ExactDistributedSampler(range(12), 4), ExactDistributedSampler(range(5), 2, evaluation=True)
    train, evaluation = zip(*ranks(2, taken, made), strict=True)
    assert sorted(sum(train, [])) == list(range(12)) and sum(evaluation, []) == list(range(5))


def test_each_sample_is_used_once_per_epoch_in_a_new_order() -> None:
    first, second = (sum(epoch, []) for epoch in epochs(96, 12, 1, 1))
    assert sorted(first) == sorted(second) == list(range(96))
    assert first != second
    train, val = validation_split(1, 100, 30)
    assert sorted([*train, *val]) == list(range(100)) and len(val) == 30


def test_the_random_numbers_are_uniform_and_independent() -> None:
    numbers = uniform(1, "a", np.arange(100_000))
    histogram = np.histogram(numbers, 100, (0, 1))[0]
    assert 50 < ((histogram - 1000) ** 2 / 1000).sum() < 160  # chi-squared with 99 degrees of freedom
    assert abs(np.corrcoef(numbers, uniform(1, "b", np.arange(100_000)))[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, uniform(2, "a", np.arange(100_000)))[0, 1]) < 0.02


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "swapped", "compressed"])
def test_a_damaged_file_is_rejected(tmp_path: Path, damage: str) -> None:
    for path in FILES.glob("*.gz"):
        shutil.copy(path, tmp_path)
    assert len(load(root=tmp_path).test) == 10_000
    labels, others = tmp_path / "t10k-labels-idx1-ubyte.gz", tmp_path / "train-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(labels.read_bytes()))
    if damage == "flipped":
        content[5000] ^= 1
        labels.write_bytes(gzip.compress(content))
    elif damage == "cut":
        labels.write_bytes(gzip.compress(content[:-1]))
    elif damage == "missing":
        labels.unlink()
    elif damage == "swapped":
        shutil.copy(others, labels)
    else:
        labels.write_bytes(labels.read_bytes()[:-20])
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte"):
        load(root=tmp_path)


@pytest.mark.parametrize("augment", ["shift", "affine"])
def test_the_augmentation_does_not_depend_on_ranks_or_workers(split: Split, augment: Any) -> None:
    def images(ranks: int, workers: int, epoch: int) -> torch.Tensor:
        parts = []
        for rank in range(ranks):
            digits = Digits(Split(split.images[:96], split.labels[:96]), augment, seed=3)
            sampler = ExactDistributedSampler(digits, 24, 3, rank=rank, world_size=ranks)
            sampler.set_epoch(epoch)
            loader = DataLoader(digits, batch_sampler=sampler, collate_fn=whole_batch, num_workers=workers)
            parts.append([batch[0] for batch in loader])
        return torch.cat([torch.cat(step) for step in zip(*parts, strict=True)])

    whole = images(1, 0, 0)
    assert torch.equal(images(3, 0, 0), whole) and torch.equal(images(2, 2, 0), whole)
    plain = Digits(Split(split.images[:96], split.labels[:96]))
    assert not torch.equal(images(1, 0, 1).sum(0), whole.sum(0))
    assert abs(float(whole.mean()) - float(plain.__getitems__(range(96))[0].mean())) < 0.05


def masks() -> torch.Tensor:
    ones = torch.ones(12 // dist.get_world_size(), 50)
    layer = SeededDropout(0.4, layer=2)
    seed_dropout(layer, 5, 17)
    return layer(ones)


def test_dropout_does_not_depend_on_ranks(ranks: Callable[..., list[Any]]) -> None:
    [whole] = ranks(1, masks)
    assert torch.equal(torch.cat(ranks(3, masks)), whole)
    assert 0.3 < float((whole == 0).float().mean()) < 0.5
    assert float(whole.max()) == pytest.approx(1 / 0.6)


def test_the_initial_weights_depend_on_the_seed_alone() -> None:
    seed_everything(1)
    first, second = make_net(seed=7), make_net(seed=7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(make_net(seed=8).fc.weight, first.fc.weight)
