"""Imports what is examined, and runs it on one rank as its user would."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError, nearest
from ddp_doctor.records.spec import Spec


def load_object(text: str) -> Any:
    """Imports what `package.module:name` or `path/to/file.py:name` names.

    Raises:
        InputError: It is not of this form, or there is no such file, module or name.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{text!r} is not a target: write package.module:name or path/to/file.py:name.")
    found: Any = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise InputError(f"{place} has no {name}{nearest(name, names) or '.'}")
        found = getattr(found, part)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(f"There is no module {name}: run the doctor in the folder that contains it.") from error
        raise


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    # As `python path/to/file.py` does. Workers and spawned processes import it by this name.
    sys.path.insert(0, str(path.parent.resolve()))
    return importlib.import_module(path.stem)


def run_target(spec: Spec, rank: int, probes: Any) -> None:
    """Runs a target on this rank."""
    target = spec.target
    if target.config:
        from ddp_doctor.launch.lightning_target import run_config

        run_config(spec, probes)
        return
    found = load_object(target.name)
    if inspect.isclass(found):
        from ddp_doctor.launch.lightning_target import run_module

        run_module(found, load_object(target.data) if target.data else None, spec, probes)
        return
    if not callable(found):
        raise InputError(f"{target.name} is a {type(found).__name__}, not a LightningModule or a function.")
    if spec.purpose not in {"train", "numbers"}:
        return
    found(*([rank, spec.world_size] if takes_rank(found, target.args) else []), *target.args)


def takes_rank(function: Any, args: tuple[str, ...]) -> bool:
    """Returns whether a function takes `(rank, world_size)` before its further arguments, as mp.spawn passes them.

    Raises:
        InputError: It takes another number of arguments.
    """
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in places
    ]
    number = len(wanted) - len(args)
    if number == 2 or (number == 0 and wanted and wanted[0].name in {"rank", "local_rank"}):
        return True
    if number > 0:
        names = ", ".join(parameter.name for parameter in wanted)
        raise InputError(
            f"{function.__name__}({names}) takes other arguments than (rank, world_size): pass them by --args."
        )
    return False
