"""The world size is no part of the experiment: one rank or several give the same training and the same counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Program, largest_difference, result_of, weights_of

from lit_mnist.distributed.sample_order import evaluation_rows, rank_rows, train_indices

# Threads that outnumber the cores wait for each other: with two to a rank these trainings take three times as long.
TRAINING = ("--precision", "64-true", "--lr", 0.05, "--run.threads", 1, "--epochs", 2)
EXACT = (*TRAINING, "--batch-size", 96, "--data.train_size", 2000, "--max-steps", 30)
EXACT = (*EXACT, "--data.test_size", 500, "--data.val_size", 99)
# BasicNet has forty times the weights.
SHORT = (*TRAINING, "--batch-size", 12, "--data.train_size", 80, "--data.test_size", 50, "--data.val_size", 9)


@pytest.mark.parametrize(
    ("net", "flags"),
    [
        pytest.param("convnet", SHORT, id="convnet, 12 steps"),
        pytest.param("convnet", EXACT, id="convnet", marks=pytest.mark.slow),
        pytest.param("basicnet", SHORT, id="basicnet, 12 steps", marks=pytest.mark.slow),
        pytest.param("basicnet", EXACT, id="basicnet", marks=pytest.mark.slow),
    ],
)
def test_one_two_and_three_ranks_train_the_same_weights(program: Program, net: str, flags: tuple[object, ...]) -> None:
    settings = ("--model.net", net, "--data.augment", "affine", *flags)
    one, two, three = (weights_of(program.train("--devices", ranks, *settings)) for ranks in (1, 2, 3))
    assert largest_difference(one, two) <= 1e-8
    assert largest_difference(one, three) <= 1e-8


def test_without_synchronised_batch_norm_the_ranks_train_other_weights(program: Program) -> None:
    one = weights_of(program.train("--devices", 1, *SHORT))
    two = weights_of(program.train("--devices", 2, "--trainer.sync_batchnorm", "false", *SHORT))
    assert largest_difference(one, two) > 1e-3


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_share_each_step_s_samples_without_overlap(world_size: int) -> None:
    count, batch_size = 1000, 96
    for epoch, batch in ((0, 0), (0, 9), (3, 5)):
        whole = train_indices(42, epoch, batch, count=count, batch_size=batch_size)
        parts = [whole[rank_rows(batch_size, rank, world_size)] for rank in range(world_size)]
        assert np.array_equal(np.concatenate(parts), whole)
        assert len({len(part) for part in parts}) == 1


def test_an_epoch_takes_each_sample_once_in_an_order_of_its_own() -> None:
    epochs = [
        np.concatenate([train_indices(1, epoch, batch, count=960, batch_size=96) for batch in range(10)])
        for epoch in range(3)
    ]
    for order in epochs:
        assert sorted(order) == list(range(960))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


@pytest.mark.parametrize("count", [1, 7, 10, 101, 9_999, 10_000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_evaluation_takes_each_sample_once(count: int, world_size: int) -> None:
    rows = [range(count)[evaluation_rows(count, rank, world_size)] for rank in range(world_size)]
    assert [sample for part in rows for sample in part] == list(range(count))
    sizes = [len(part) for part in rows]
    assert max(sizes) - min(sizes) <= 1


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    return shared_program.train(
        "--devices", 1, "--max-steps", 30, "--lr", 0.01, "--data.train_size", 6000, "--run.threads", 1
    )


ALL = (1, 2, 3, 4, 7)
WORLDS = [pytest.param(9_999, (1, 7), marks=pytest.mark.slow), (10, (1, 3))]
EVERY_WORLD = [pytest.param(size, ALL, marks=pytest.mark.slow) for size in (10_000, 9_999, 101, 10)]


@pytest.mark.parametrize(("size", "worlds"), [*WORLDS, *EVERY_WORLD])
def test_any_number_of_ranks_counts_the_same(
    trained: Path, shared_program: Program, size: int, worlds: tuple[int, ...]
) -> None:
    found = []
    for ranks in worlds:
        folder = shared_program.train("test", "--ckpt", trained, "--devices", ranks, "--data.test_size", size)
        found.append(result_of(folder)["test"])
    assert found[0]["count"] == size
    assert np.sum(found[0]["confusion"]) == size
    # Of a network that predicts one class of all images, any ranks would count the same.
    assert np.count_nonzero(np.sum(found[0]["confusion"], axis=0)) > 3
    for other in found[1:]:
        assert other["confusion"] == found[0]["confusion"]
        assert other["accuracy"] == found[0]["accuracy"]
        assert other["per_class"] == found[0]["per_class"]
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
