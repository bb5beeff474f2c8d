"""The programs of the suite run by themselves."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import lightning
import pytest
import torch
from doctor_support import run_forked
from projects.cases import CASES, FAMILIES, PROJECTS, TRAINCHECK, Case

from ddp_doctor.faults import describe

# A program takes about a second; one that hangs ends after the 15 seconds of its process group.
TIMEOUT = 90
# Two ranks of these hang or lose each other, or torch reports the fault.
FAILING = {
    "ld027_rank_0_validation": "",
    "ld028_uneven_shards": "",
    "ld029_unused_parameters": "parameters that were not used in producing the loss",
}
PROGRAMS = (*CASES, *(case for cases in FAMILIES.values() for case in cases), *TRAINCHECK)


def load(path: Path) -> ModuleType:
    """Imports a program from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_rank(rank: int, case: Case, world_size: int, port: int) -> None:
    """Runs a program as its user would: a function by a call, a module by a stock Trainer with 3 batches per epoch."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(rank + 1)
    program = load(case.path)
    target = getattr(program, case.target)
    if not isinstance(target, type):
        target(*((rank, world_size) if inspect.signature(target).parameters else ()))
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
    module, data = target(), getattr(program, case.data)() if case.data else None
    trainer.fit(module, data)
    if "predict_step" in vars(target):
        trainer.predict(module, data)


def run_ranks(case: Case, world_size: int) -> int:
    """Runs the ranks of a program in forked processes; raises what one of them has raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(run_rank, (case, world_size, port), world_size, start_method="fork")
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if not case.command], ids=lambda case: case.name)
def test_program_runs_by_itself(case: Case, devices: int, tmp_path: Path) -> None:
    done = run_forked(lambda: run_ranks(case, devices), tmp_path, TIMEOUT)
    fails = devices == 2 and case.name in FAILING
    assert bool(done.code) == fails, done.out + done.err
    assert not fails or FAILING[case.name] in done.err


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.command], ids=lambda case: case.name)
def test_command_runs_by_itself(case: Case, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name(case.words[0])), *case.words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_program_is_valid_and_differs() -> None:
    assert len({case.name for case in PROGRAMS}) == len(PROGRAMS)
    assert len({(case.target, ast.unparse(ast.parse(case.text))) for case in PROGRAMS}) == len(PROGRAMS)
    assert {code for case in PROGRAMS for code in case.codes} == set(describe())


def test_each_base_and_each_table_is_used() -> None:
    tables = {path.name: path.read_text() for path in PROJECTS.glob("*.txt")}
    assert all(path.name in "".join(tables.values()) for path in (PROJECTS / "bases").glob("*.py"))
    # test_ways examines these.
    del tables["batching.txt"]
    assert sum(table.count("\n## ") for table in tables.values()) == len(PROGRAMS)
