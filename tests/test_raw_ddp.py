"""Raw DDP: each of its six differences to one process is needed, and it resumes exactly."""

import os
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from launching import Command, Completed

from lit_mnist import raw_ddp
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, parse
from lit_mnist.mnist import Split

SOURCE = Path(raw_ddp.__file__).read_text()
TESTED = 101
WORDS = [
    *("--devices", "2", "--precision", "32-true", "--batch-size", "16", "--epochs", "2", "--data.val_size", "9"),
    *("--trainer.limit_train_batches", "5", "--trainer.accumulate_grad_batches", "2", "--lr", "0.01"),
]


class Seen(NamedTuple):
    """What one rank has trained, counted and written."""

    weights: dict[str, torch.Tensor]
    count: int
    loss: float
    files: int


def train_with(line: str, naive: str, experiment: Experiment) -> Seen:
    """Trains in this rank with a naive line in the place of one of the file."""
    assert line in SOURCE
    module: Any = types.ModuleType("naive")
    sys.modules["naive"] = module
    exec(compile(SOURCE.replace(line, naive), "naive.py", "exec"), vars(module))  # noqa: S102
    load_data, finish, evaluate = Experiment.load_data, module.finish, module.evaluate
    files: list[Any] = []
    seen: dict[str, Any] = {}

    def load_few(self: Experiment) -> Any:
        data = load_data(self)
        assert data.data
        test = data.data.test
        data.data = replace(data.data, test=Split(test.images[:TESTED], test.labels[:TESTED]))
        return data

    def watch_finish(experiment: Any, data: Any, net: Any, *rest: Any) -> None:
        seen["weights"] = {name: value.clone() for name, value in net.state_dict().items()}
        finish(experiment, data, net, *rest)

    def watch_evaluate(*args: Any) -> Any:
        seen["test"] = evaluate(*args)
        return seen["test"]

    Experiment.load_data = load_few  # type: ignore[method-assign]
    module.finish, module.evaluate = watch_finish, watch_evaluate
    module.write_checkpoint = module.write_result = lambda *args: files.append(args)
    experiment.folder.mkdir(exist_ok=True)
    module.train(experiment)
    dist.barrier()
    metrics, _ = seen["test"]
    return Seen(seen["weights"], metrics["count"], metrics["loss"], len(files))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def other_weights(control: list[Seen], naive: list[Seen]) -> bool:
    return not equal(control[0].weights, naive[0].weights)


def ranks_differ(control: list[Seen], naive: list[Seen]) -> bool:
    return not equal(naive[0].weights, naive[1].weights)


def both_write(control: list[Seen], naive: list[Seen]) -> bool:
    return naive[1].files == control[0].files


def part_is_counted(control: list[Seen], naive: list[Seen]) -> bool:
    return [rank.count for rank in naive] == [TESTED // 2, TESTED - TESTED // 2]


def part_is_summed(control: list[Seen], naive: list[Seen]) -> bool:
    return equal(control[0].weights, naive[0].weights) and naive[0].loss < 0.8 * control[0].loss


DDP = 'model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)  # (2)'
NAIVE = {
    "(1) no group is joined": ("rank, world_size = place()", "rank, world_size = 0, 1", both_write),
    "(2) each rank normalizes by itself": ("net = sync_batch_norm(net, device.type)  # (2)", "pass", other_weights),
    "(2) no gradient is averaged": (DDP, "model.no_sync = nullcontext", ranks_differ),
    "(3) all ranks take one part": ("seed, rank=rank,", "seed, rank=0,", other_weights),
    "(3) the order does not change": (
        '{"epoch": epoch, "start": first})  # (3)',
        '{"epoch": 0, "start": 0})',
        other_weights,
    ),
    "(4) the losses are added": ("share = loss / accumulate * (accumulate / window)", "share = loss", other_weights),
    "(4) the last window is halved": ("* (accumulate / window)", "", other_weights),
    "(5) every rank writes": ("if rank != 0:  # (5)", "if False:", both_write),
    "(6) the counts are not reduced": ("dist.all_reduce(confusion)  # (6)", "pass", part_is_counted),
    "(6) the losses are not reduced": ("dist.all_reduce(loss)  # (6)", "pass", part_is_summed),
}


@pytest.fixture(scope="module")
def controls() -> list[list[Seen]]:
    """What the unchanged file does, once it has been observed."""
    return []


@pytest.mark.parametrize("case", NAIVE)
def test_each_difference_is_needed(
    ranks: Callable[..., list[Any]], controls: list[list[Seen]], tmp_path: Path, case: str
) -> None:
    experiment = replace(parse("raw_ddp", WORDS), folder=tmp_path / "run")
    if not controls:
        controls.append(ranks(2, train_with, "train", "train", experiment))
        assert equal(controls[0][0].weights, controls[0][1].weights)
        assert [rank.count for rank in controls[0]] == [TESTED, TESTED]
        assert controls[0][1].files == 0
    line, naive, check = NAIVE[case]
    assert check(controls[0], ranks(2, train_with, line, naive, experiment))


# Two epochs, with a save in the middle of the first.
LONG = ("-m", "lit_mnist.raw_ddp", "--devices", 2, "--precision", "32-true", "--batch-size", 8, "--data.val_size", 200)
LIMITS = ("--trainer.limit_train_batches", 220, "--epochs", 2, "--trainer.accumulate_grad_batches", 2)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_stopped_in_mid_epoch_and_resumed_is_bit_identical(
    start_command: Callable[..., Command], train: Callable[..., dict[str, Any]], tmp_path: Path, signum: int
) -> None:
    folder = tmp_path / "stopped"
    stopped = start_command(*LONG, *LIMITS, "--run-dir", folder)
    stopped.wait_for((folder / "checkpoints" / "last.ckpt").exists)
    os.kill(stopped.pid, signum)
    assert stopped.wait(60).code == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert not (folder / "result.json").exists()
    resumed = train("-m", "lit_mnist.raw_ddp", "--resume", folder, run_dir=folder)
    expected = train(*LONG, *LIMITS)
    assert resumed["steps"] == expected["steps"] == 220
    assert resumed["weights_sha256"] == expected["weights_sha256"]
    assert resumed["test"] == expected["test"]


def test_resume_rejects_a_checkpoint_of_lightning(command: Callable[..., Completed], tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    completed = command("-m", "lit_mnist.raw_ddp", "--resume", tmp_path / "other.ckpt", "--run-dir", tmp_path / "run")
    assert completed.code == 2
    assert "ckpt_path" in completed.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--trainer.max_time", "00:00:01:00"], "max_time"),
        (["--trainer.strategy", "fsdp"], "strategy"),
        (["--trainer.callbacks+=LearningRateMonitor"], "callbacks"),
        (["--optimizer", "Adam"], "optimizer"),
        (["--model", "lightning.pytorch.demos.boring_classes.BoringModel"], "BoringModel"),
        (["--precision", "bf16-true"], "precision"),
        (["fit"], "fit"),
    ],
)
def test_options_of_a_trainer_alone_are_rejected(words: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse("raw_ddp", words)
