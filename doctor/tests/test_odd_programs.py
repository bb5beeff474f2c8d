"""Each odd program gets a verdict or one message, and leaves no process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ddp_doctor
from ddp_doctor.errors import InputError


def train(rank, world_size, model, before_step=lambda step: None, counts=False):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator))
    sampler = DistributedSampler(dataset, world_size, rank)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for epoch in range(3 if counts else 2):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(DataLoader(dataset, 4 if counts else 8, sampler=sampler)):
            before_step(step)
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        assert not counts or step + 1 == len(sampler) // 4, f"{step + 1} batches in epoch {epoch}"
    dist.destroy_process_group()


def hangs(rank, world_size):
    def wait(step):
        if rank == 1 and step == 1:
            time.sleep(1000)

    train(rank, world_size, nn.Linear(16, 4), wait)


def hangs_alone(rank, world_size):
    time.sleep(1000)


class Undetermined(nn.Linear):
    def forward(self, x):
        return super().forward(x * (1 + int.from_bytes(os.urandom(2), "big") / 1e5))


def is_not_deterministic(rank, world_size):
    train(rank, world_size, Undetermined(16, 4))


class Single(nn.Linear):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("only float32")
        return super().forward(x)


def has_no_64_bits(rank, world_size):
    train(rank, world_size, Single(16, 4, dtype=torch.float32))


def exits(rank, world_size):
    train(rank, world_size, nn.Linear(16, 4), lambda step: sys.exit(3) if step == 2 else None)


def dies(rank, world_size):
    train(rank, world_size, nn.Linear(16, 4), lambda step: os._exit(9) if rank == 1 and step == 1 else None)


def fails_on_rank_1(rank, world_size):
    if rank == 1:
        raise ValueError("no data for rank 1")
    train(rank, world_size, nn.Linear(16, 4))


def starts_processes(rank, world_size):
    subprocess.Popen(["sleep", "4567"])
    subprocess.Popen(["sleep", "4567"], start_new_session=True)
    train(rank, world_size, nn.Linear(16, 4))


def counts_its_samples(rank, world_size):
    """Expects that each epoch has all batches of its loader, as programs do that check themselves."""
    train(rank, world_size, nn.Linear(16, 4), counts=True)


def needs_two_ranks(rank, world_size):
    if world_size < 2:
        raise ValueError("the data of one rank are missing")
    train(rank, world_size, nn.Linear(16, 4))


def does_nothing(rank, world_size):
    pass


def takes_three(a, b, c):
    pass


def examined(name, **options):
    return ddp_doctor.examine(f"{__file__}:{name}", **{"timeout": 30, **options})


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("hangs", 3, ["Rank 1 waited or hung in step 1", "in wait", "Rank 0"]),
        ("hangs_alone", 3, ["hangs_alone"]),
        ("dies", 3, ["Rank 1 exited with code 9"]),
        ("fails_on_rank_1", 3, ["ValueError: no data for rank 1"]),
        # What fails on one process already shows its own traceback.
        ("exits", 2, ["SystemExit: 3"]),
    ],
)
def test_a_program_that_does_not_end_well_is_reported(name, code, said):
    report = examined(name)
    assert report.exit_code == code
    assert all(text in (report.hang or report.error) for text in said), report.hang + report.error
    assert str(Path(ddp_doctor.__file__).parent) not in report.error


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_rank_that_hangs_under_torchrun_is_shown(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    Path("train.py").write_text("import os, test_odd_programs\ntest_odd_programs.hangs(int(os.environ['RANK']), 2)\n")
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    report = ddp_doctor.examine(command=command, only=["LD032"], timeout=20)
    assert report.exit_code == 3
    assert all(text in report.hang for text in ("Rank 1 waited or hung", "in wait", "Rank 0")), report.hang


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("is_not_deterministic", "different weights"),
        ("has_no_64_bits", "in 32 bits"),
        ("counts_its_samples", "whole epochs"),
        ("needs_two_ranks", "it fails on one process"),
    ],
)
def test_what_an_odd_program_needs_is_no_fault(name, said):
    report = examined(name)
    assert (report.faults, report.error, report.hang) == ([], "", "")
    assert any(said in stage.outcome for stage in report.stages)
    assert report.comparison.made == (name in {"has_no_64_bits", "counts_its_samples"})


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_no_process_is_left():
    report = examined("starts_processes")
    assert (report.faults, report.error, report.hang) == ([], "", "")
    assert subprocess.run(["pgrep", "-f", "sleep 4567"], check=False).returncode == 1


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "said"),
    [("does_nothing", "without training"), ("takes_three", r"takes_three\(a, b, c\)"), ("missing", "has no missing")],
)
def test_a_wrong_target_is_rejected(name, said):
    with pytest.raises(InputError, match=said):
        examined(name)
