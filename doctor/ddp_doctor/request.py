"""What is wrong with a request before anything was run. Imports no torch."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.errors import InputError

_LEAST = {"devices": 2, "steps": 2}


def check_request(request: argparse.Namespace) -> None:
    """Raises an InputError for targets and paths that cannot work; nothing was run."""
    if "LOCAL_RANK" in os.environ:
        raise InputError("The doctor starts the ranks: run it without a launcher, or give the command after --.")
    if sum(map(bool, (request.target, request.config, request.command))) != 1:
        raise InputError("What should be examined? Name one of a target, --config FILE, and a command after --.")
    for name in filter(None, (request.target, request.data)):
        if not all(name.rpartition(":")[::2]):
            raise InputError(
                f"{name} is not a target: write package.module:name or path/to/file.py:name, or give a command after "
                "--, such as: ddp-doctor -- torchrun --nproc-per-node 2 train.py"
            )
    if request.data and not request.target:
        raise InputError("--data belongs to a LightningModule.")
    if request.args and not request.target:
        raise InputError("--args belongs to a function.")
    place = request.target.rpartition(":")[0]
    for file in (place if place.endswith(".py") else "", request.config, request.baseline):
        if file and not Path(file).is_file():
            raise InputError(f"There is no file {file}.")
    _check_script(request.command)
    check_limits(**{name: getattr(request, name) for name in ("devices", "steps", "samples", "timeout")})
    for name in ("json", "html", "output", "write_baseline"):
        path = getattr(request, name)
        # Otherwise, the report would be lost after minutes.
        if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
            raise InputError(f"--{name.replace('_', '-')} {path}: this file cannot be written.")


def _check_script(command: Sequence[str]) -> None:
    """Rejects a script that Python cannot read, which torchrun says before a long text about its processes."""
    script = next((word for word in command if word.endswith(".py")), "")
    if not script or command[0] not in {"python", "python3", "torchrun"} or {"-m", "-c", "--no-python"} & {*command}:
        return
    try:
        ast.parse(Path(script).read_bytes(), script)
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{script} cannot be run: {error}") from error


def check_limits(**limits: float) -> None:
    """Raises an InputError for a number that is too small."""
    for name, value in limits.items():
        if not value >= _LEAST.get(name, 1):
            raise InputError(f"{name} must be at least {_LEAST.get(name, 1)}, but is {value}.")
