"""What is wrong with a request before anything was run. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.errors import InputError

# What starts scripts: a first word that belongs to a command.
PROGRAMS = ("python", "python3", "torchrun", "accelerate", "fabric", "deepspeed", "srun", "mpirun", "bash", "sh")
_LEAST = {"devices": 2, "steps": 2}
_LAUNCHED = ({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}, {"SLURM_STEP_ID", "SLURM_PROCID"})


def check_request(request: argparse.Namespace) -> None:
    """Raises an InputError for targets and paths that cannot work; nothing was run."""
    if any(names <= os.environ.keys() for names in _LAUNCHED) and int(os.environ.get("SLURM_STEP_NUM_TASKS", "2")) > 1:
        raise InputError("The doctor starts the ranks: run it without a launcher, or give the command after --.")
    given = [bool(request.target), bool(request.config), bool(request.command)]
    if not any(given):
        raise InputError("What should be examined? Name a module or function, --config FILE, or a command after --.")
    if sum(given) > 1:
        raise InputError("Name one of a target, --config and a command after --.")
    for name in (request.target, request.data or ""):
        if name and not (":" in name and all(name.rpartition(":")[::2])):
            raise InputError(f"{name} is not a target: write package.module:name or path/to/file.py:name{_meant(name)}")
        file = name.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise InputError(f"There is no file {file}.")
    if request.data and not request.target:
        raise InputError("--data belongs to a LightningModule.")
    if request.args and not request.target:
        raise InputError("--args belongs to a function.")
    if request.config and not Path(request.config).is_file():
        raise InputError(f"There is no file {request.config}.")
    if request.baseline and not Path(request.baseline).is_file():
        raise InputError(f"--baseline {request.baseline}: there is no such file; --write-baseline writes it.")
    _check_script(request.command)
    check_limits(**{name: getattr(request, name) for name in ("devices", "steps", "samples", "timeout")})
    names = ("json", "html", "output", "write_baseline")
    written = {f"--{name.replace('_', '-')}": value for name in names if (value := getattr(request, name))}
    for flag, name in written.items():
        _check_writable(flag, Path(name))
    _check_different({flag: Path(name).absolute() for flag, name in written.items()})


def _check_writable(flag: str, file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise InputError(f"{flag} {file}: there is no folder {file.parent}.")
    if file.is_dir():
        raise InputError(f"{flag} {file}: this is a folder, not a file.")
    if not os.access(file.absolute().parent, os.W_OK):
        raise InputError(f"{flag} {file}: the file cannot be written.")


def _check_script(command: Sequence[str]) -> None:
    """Rejects a script of Python or of a launcher that does not exist, which a launcher says only at great length."""
    if not command or Path(command[0]).name not in PROGRAMS or {"-m", "-c", "--no-python"} & set(command):
        return
    script = next((word for word in command if word.endswith(".py") and not word.startswith("-")), "")
    if script and not Path(script).exists():
        raise InputError(f"There is no file {script}.")


def check_limits(**limits: float) -> None:
    """Raises an InputError for a number that is too small."""
    for name, value in limits.items():
        if not value >= _LEAST.get(name, 1):
            raise InputError(f"{name} must be at least {_LEAST.get(name, 1)}, but is {value}.")


def _check_different(files: dict[str, Path]) -> None:
    flags: dict[Path, str] = {}
    for flag, path in files.items():
        if path in flags:
            raise InputError(f"{flags[path]} and {flag} name the same file.")
        flags[path] = flag


def _meant(name: str) -> str:
    module, dot, attribute = name.rpartition(".")
    if name.endswith(".py"):
        return f", or examine the whole script with -- torchrun --nproc-per-node 2 {name}"
    if Path(name).is_file():
        return ", where file.py is a file of Python."
    return f"; did you mean {module}:{attribute}?" if dot and ":" not in name and attribute.isidentifier() else "."
