"""The planted-bug suite's projects run by themselves, and the table of cases lists all of them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import lightning
import pytest
import torch
from doctor_support import run_forked
from projects.cases import CASES, FAULTY, HEALTHY, PROJECTS, Case

# A project takes about a second; a project that hangs ends after the 15 seconds of its process group.
TIMEOUT = 90


def load(path: Path) -> ModuleType:
    """Imports a project from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_rank(case: Case, rank: int, world_size: int) -> None:
    """Runs a project as its user would: a function by a call, a module by a stock Trainer with 3 batches per epoch."""
    project = load(case.path)
    if case.target != "Module":
        arguments = (rank, world_size) if inspect.signature(project.main).parameters else ()
        project.main(*arguments)
        return
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=2,
        limit_train_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = project.Module(), project.Data() if case.data else None
    trainer.fit(module, data)
    if "predict_step" in vars(project.Module):
        trainer.predict(module, data)


def run_ranks(case: Case, world_size: int) -> int:
    """Runs the ranks of a project in forked processes. Returns the largest exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        child = os.fork()
        if child:
            ranks.append(child)
            continue
        code = 1
        with suppress(BaseException):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ.update({name: str(number) for name, number in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            torch.set_num_threads(1)
            torch.manual_seed(rank + 1)
            try:
                run_rank(case, rank, world_size)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if not case.command], ids=lambda case: case.name)
def test_project_runs_by_itself(case: Case, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_forked(lambda: run_ranks(case, devices), tmp_path, TIMEOUT)
    fails = devices == 2 and (case.hangs or case.error)
    assert bool(done.code) == bool(fails), done.out + done.err
    assert not fails or case.error in done.err


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.command], ids=lambda case: case.name)
def test_command_runs_by_itself(case: Case, tmp_path: Path) -> None:
    program, *words = case.words
    launcher = [sys.executable, *(["-m", "torch.distributed.run"] if program == "torchrun" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *words],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_table_lists_each_project_once() -> None:
    files = {str(path.relative_to(PROJECTS)) for path in PROJECTS.glob("*/*.py")}
    assert sorted(case.file for case in CASES) == sorted(files)
    assert {code for case in FAULTY for code in case.codes} == {f"LD{row:03}" for row in range(1, 33)}
    assert not any(case.codes for case in HEALTHY)
