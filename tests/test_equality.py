"""Engines, numbers of ranks and launchers train the same weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, Completed

from lit_mnist.compare import ENGINES
from lit_mnist.plugins.checkpoint_io import read_checkpoint

# Two epochs of five micro-batches, two to a step: the third step of an epoch has one only.
WINDOWS = (
    *("--trainer.limit_train_batches", 5, "--epochs", 2, "--trainer.accumulate_grad_batches", 2),
    *("--trainer.gradient_clip_val", 1.0, "--batch-size", 48, "--data.val_size", 100, "--data.augment", "shift"),
)
Train = Callable[..., dict[str, Any]]


def words_of(engine: str) -> tuple[str, ...]:
    return () if engine == "lightning" else ("-m", ENGINES[engine])


def cases() -> list[Any]:
    quick = [
        (("lightning", "raw_ddp", "fabric"), "32-true", 2, "convnet"),
        (("lightning", "raw_ddp"), "bf16-mixed", 2, "basicnet"),
    ]
    exact = ("lightning", "raw_ddp", "fabric", "accelerate", "hf_trainer")
    long = [
        (exact if ranks == 3 else (*exact, "parameter_server"), precision, ranks, net)
        for precision in ("32-true", "bf16-mixed", "64-true")
        for ranks in (1, 2, 3)
        for net in ("convnet", "basicnet")
    ]
    long += [(("lightning", "raw_ddp", "fabric"), "16-mixed", ranks, "convnet") for ranks in (1, 2, 3)]
    return [*quick, *(pytest.param(*case, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]) for case in long)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engines", "precision", "ranks", "net"), cases())
def test_engines_train_bit_identical_weights(
    train: Train, engines: tuple[str, ...], precision: str, ranks: int, net: str
) -> None:
    options = ("--devices", ranks, "--precision", precision, "--model.net", net, *WINDOWS)
    results = {engine: train(*words_of(engine), *options) for engine in engines}
    assert {result["steps"] for result in results.values()} == {6}
    assert {result["precision"] for result in results.values()} == {precision}
    assert len({result["weights_sha256"] for result in results.values()}) == 1
    # Both choose the best weights, and count every sample once.
    assert results["lightning"]["test"]["confusion"] == results["raw_ddp"]["test"]["confusion"]
    assert results["lightning"]["test"]["count"] == 10_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["lightning", pytest.param("raw_ddp", marks=pytest.mark.nightly)])
def test_ranks_train_the_same_weights(train: Train, tmp_path: Path, engine: str) -> None:
    weights = []
    for ranks in (1, 2, 3):
        folder = tmp_path / f"ranks-{ranks}"
        options = ("--precision", "64-true", "--batch-size", 48, "--trainer.limit_train_batches", 12)
        words = ("fit",) if engine == "lightning" else words_of(engine)
        train(*words, "--devices", ranks, *options, "--data.val_size", 100, run_dir=folder)
        saved = read_checkpoint(folder / "checkpoints" / "last.ckpt")
        net = saved["net"] if engine == "raw_ddp" else saved["state_dict"]
        weights.append({name: value for name, value in net.items() if value.is_floating_point()})
    for others in weights[1:]:
        for name, expected in weights[0].items():
            torch.testing.assert_close(others[name], expected, rtol=0, atol=1e-8)


STEPS = ("--devices", "2", "--precision", "32-true", "--max-steps", "12")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        ["-m", "lit_mnist.raw_ddp", "--launcher", "spawn"],
        [*TORCHRUN, "-m", "lit_mnist.raw_ddp"],
        pytest.param([*TORCHRUN, str(ROOT / "train.py")], marks=pytest.mark.nightly),
    ],
    ids=["spawn", "torchrun raw_ddp", "torchrun train.py"],
)
def test_launchers_train_bit_identical_weights(
    command: Callable[..., Completed], tmp_path: Path, words: list[str]
) -> None:
    environment = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it
    forked, other = tmp_path / "forked", tmp_path / "other"
    completed = command("-m", "lit_mnist.raw_ddp", *STEPS, "--run-dir", forked, **environment)
    assert completed.code == 0, completed.output
    if words[0] == "-m":
        completed = command(*words, *STEPS, "--run-dir", other, **environment)
        assert completed.code == 0, completed.output
    else:
        run([*words, *STEPS, "--run-dir", str(other)])
    assert weights_sha256(other) == weights_sha256(forked)


@pytest.mark.timeout(600)
def test_example_trains_the_weights_of_raw_ddp(train: Train) -> None:
    output = run([sys.executable, str(ROOT / "examples" / "ddp.py"), "--devices", "2", "--max-steps", "12"])
    assert train("-m", "lit_mnist.raw_ddp", *STEPS)["weights_sha256"] in output


def weights_sha256(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


def run(words: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engines", "code", "expected"),
    [
        (("raw_ddp", "data_parallel"), 1, "differs from step 1, first in layer1.0.weight"),
        pytest.param(("lightning", "raw_ddp", "accelerate"), 0, "bit-identical (12 steps", marks=pytest.mark.nightly),
    ],
)
def test_comparison_finds_the_first_difference(
    command: Callable[..., Completed], engines: tuple[str, ...], code: int, expected: str
) -> None:
    completed = command("compare", "--engines", *engines, *STEPS, timeout=200)
    assert completed.code == code, completed.output
    assert f"{engines[-1]}: {expected}" in completed.output
