"""What is wrong with a request before anything was run. Imports no torch."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_doctor.errors import InputError

# What starts scripts: a first word that belongs to a command.
PROGRAMS = ("python", "python3", "torchrun", "accelerate", "fabric", "deepspeed", "srun", "mpirun", "bash", "sh")
# What torchrun accepts for a number of ranks, with the names of devices that packages add to torch.
_DEVICES = {"auto", "cpu", "gpu", "hpu", "mlu", "musa", "npu", "privateuseone", "xpu"}
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
        if file.endswith(".py") and not _is_file(file):
            raise InputError(f"There is no file {file}.")
    if request.data and not request.target:
        raise InputError("--data belongs to a LightningModule.")
    if request.args and not request.target:
        raise InputError("--args belongs to a function.")
    if request.config and not _is_file(request.config):
        raise InputError(f"There is no file {request.config}.")
    if request.baseline and not _is_file(request.baseline):
        raise InputError(f"--baseline {request.baseline}: there is no such file; --write-baseline writes it.")
    _check_script(request.command)
    check_limits(**{name: getattr(request, name) for name in ("devices", "steps", "samples", "timeout")})
    names = ("json", "html", "output", "write_baseline")
    written = {f"--{name.replace('_', '-')}": value for name in names if (value := getattr(request, name))}
    for flag, name in written.items():
        _check_writable(flag, Path(name))
    _check_different({flag: Path(name).absolute() for flag, name in written.items()})


def _is_file(name: str) -> bool:
    with suppress(OSError):
        return Path(name).is_file()
    return False


def _is_folder(name: str) -> bool:
    """Returns whether there is such a folder, without a `__main__.py` that Python would run."""
    with suppress(OSError):
        return Path(name).is_dir() and not Path(name, "__main__.py").exists()
    return False


def _check_writable(flag: str, file: Path) -> None:
    try:
        if not file.absolute().parent.is_dir():
            raise InputError(f"{flag} {file}: there is no folder {file.parent}.")
        if file.is_dir():
            raise InputError(f"{flag} {file}: this is a folder, not a file.")
    except OSError as error:
        raise InputError(f"{flag} {file}: the file cannot be written ({error.strerror}).") from error
    if not os.access(file.absolute().parent, os.W_OK):
        raise InputError(f"{flag} {file}: the file cannot be written.")


def _check_script(command: Sequence[str]) -> None:
    """Rejects what a launcher says only at great length: a number of ranks that is none, and a script without one."""
    name = Path(command[0]).name if command else ""
    if name == "torchrun":
        _check_ranks(command)
    if name not in PROGRAMS or {"-m", "-c", "--no-python"} & set(command):
        return
    script = next((word for word in command if word.endswith(".py") and not word.startswith("-")), "")
    if script and not _is_file(script):
        raise InputError(f"There is no file {script}.")
    beside = Path(sys.executable).parent
    found = shutil.which(command[0]) or shutil.which(command[0], path=str(beside))
    if script and found and Path(found).parent == beside:
        _check_syntax(Path(script))
    if not script and name == "torchrun" and _is_folder(command[-1]):
        raise InputError(f"{command[-1]} is a folder, not a script.")


def _check_ranks(command: Sequence[str]) -> None:
    """Rejects a number of ranks that torchrun does not accept, or that starts none."""
    last = 0
    # What follows the script is the script's own.
    end = next((number for number, word in enumerate(command) if word.endswith(".py")), len(command))
    for number, word in enumerate(command[:end]):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--nproc-per-node":
            last = number if equals else number + 1
            value = value or next(iter(command[number + 1 :]), "")
            if value not in _DEVICES and not (value.isdecimal() and int(value) > 0):
                raise InputError(f"{flag} must be a number of ranks from 1, but is {value or 'missing'}.")
    if last == len(command) - 1:
        raise InputError("torchrun needs a script: ddp-doctor -- torchrun --nproc-per-node 2 train.py")


def _check_syntax(script: Path) -> None:
    """Rejects a script that the Python of the doctor, which is also that of the command, cannot compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InputError(f"{script}{line}: {getattr(error, 'msg', error)}. The script cannot be compiled.") from error
    except OSError as error:
        raise InputError(f"{script} cannot be read: {error.strerror}.") from error


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
    if _is_file(name):
        return ", where file.py is a file of Python."
    return f"; did you mean {module}:{attribute}?" if dot and ":" not in name and attribute.isidentifier() else "."
