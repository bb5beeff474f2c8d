"""One rank of a run: installs the probes, runs what is examined as its user would, and writes the record."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import shlex
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError, nearest
from ddp_doctor.records.spec import PACKAGE, Spec


def run_rank(folder: Path, spec: Spec) -> int:
    """Runs a target in this process, whose environment names its rank; returns an exit code."""
    rank = int(os.environ["RANK"])
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack{rank}.txt").open("w"), all_threads=True)
    if spec.purpose == "bare":
        sys.path.insert(0, str(Path.cwd()))
        run_target(spec, rank, None)
        return 0
    from ddp_doctor.launch.gpus import emulate, watch
    from ddp_doctor.probes.install import Probes

    emulate(spec)
    watch(folder, spec)
    probes = Probes(folder, spec)
    sys.path.insert(0, str(Path.cwd()))
    try:
        probes.install()
        run_target(spec, rank, probes)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in {None, 0}):
            wrong = isinstance(error, InputError)
            trace = "" if wrong else _user_trace(error)
            told = {"type": type(error).__name__, "message": str(error), "trace": trace, "input": wrong}
            probes.end(reached_end=False, error=told)
            return 2 if wrong else 1
    probes.loaders.close()
    probes.end(reached_end=True)
    return 0


def _user_trace(error: BaseException) -> str:
    """Returns the traceback without the frames of the doctor."""
    found = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = found
    while part is not None:
        kept = [frame for frame in part.stack if not frame.filename.startswith((PACKAGE, "<frozen importlib"))]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(found.format())


def run_target(spec: Spec, rank: int, probes: Any) -> None:
    """Runs a target on this rank."""
    target = spec.target
    if target.config:
        from ddp_doctor.launch.lightning_rank import run_config

        run_config(spec, probes)
        return
    found = load_object(target.name)
    if inspect.isclass(found):
        from ddp_doctor.launch.lightning_rank import run_module

        run_module(found, load_object(target.data) if target.data else None, spec, probes)
    elif not callable(found):
        raise InputError(f"{target.name} is a {type(found).__name__}, not a LightningModule or a function.")
    elif spec.purpose in {"train", "numbers", "bare"}:
        found(*([rank, spec.world_size] if takes_rank(found, target.args) else []), *target.args)


def load_object(text: str) -> Any:
    """Imports what `package.module:name` or `path/to/file.py:name` names.

    Raises:
        InputError: It is not of this form, there is no such file, module or name, or its import ends the process.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InputError(f"{text!r} is not a target: write package.module:name or path/to/file.py:name.")
    try:
        found: Any = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    except SystemExit as error:
        command = shlex.join(["torchrun", "--nproc-per-node", "2", *([] if place.endswith(".py") else ["-m"]), place])
        raise InputError(
            f"{place} ends the process while it is imported, as a script that reads its own options does: examine its "
            f"command instead, with these options: ddp-doctor -- {command}"
        ) from error
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


def takes_rank(function: Any, args: tuple[str, ...]) -> bool:
    """Returns whether a function takes `(rank, world_size)` before its further arguments, as mp.spawn passes them.

    Raises:
        InputError: It takes another number of arguments.
    """
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    wanted = [one.name for one in parameters if one.default is one.empty and one.kind in places]
    number = len(wanted) - len(args)
    if number == 2 or (number == 0 and wanted and wanted[0] in {"rank", "local_rank"}):
        return True
    if number > 0:
        raise InputError(
            f"{function.__name__}({', '.join(wanted)}) takes other arguments than (rank, world_size): use --args."
        )
    return False
