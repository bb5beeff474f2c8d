"""One rank of a run: installs the probes, runs what is examined as its user would, and writes the record."""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_doctor.errors import InputError
from ddp_doctor.records.spec import Spec, read

# Programs that start ranks as other processes, and so never train themselves.
_LAUNCHERS = {"torchrun", "accelerate"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def run_rank(folder: Path, spec: Spec) -> int:
    """Runs a target in this process, whose environment names its rank; returns an exit code."""
    rank = int(os.environ["RANK"])
    if spec.purpose == "bare":
        sys.path.insert(0, str(Path.cwd()))
        _run_target(spec, rank)
        return 0
    _prepare(folder, spec)
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
    sys.path.insert(0, str(Path.cwd()))
    try:
        probes.install()
        _run_target(spec, rank)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in {None, 0}):
            probes.end(reached_end=False, error=described(error))
            return 2 if isinstance(error, InputError) else 1
    probes.loaders.close()
    probes.end(reached_end=True)
    return 0


def observe(folder: Path) -> None:
    """Observes this Python process, which a command has started.

    The record is written when the process ends, if it has taken part in training.
    """
    spec = read(folder)
    _prepare(folder, spec)
    if is_launcher(sys.orig_argv):
        # The probes would see nothing, and their imports take time.
        return
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
    probes.install()
    # The processes that may record something, and have not.
    owners, failed, show = {os.getpid()}, dict[str, Any](), sys.excepthook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.update(described(error))
        show(kind, error, trace)

    def on_exit() -> None:
        # Both functions below call it in most processes.
        if os.getpid() in owners and (probes.recorder.active or failed):
            owners.discard(os.getpid())
            # A process of multiprocessing ends with the exception of its function, or exits because of it.
            error = sys.exception() if not failed else None
            if isinstance(error, SystemExit):
                error = error.__context__ if error.code else None
            if error is not None:
                failed.update(described(error))
            probes.loaders.close()
            probes.end(reached_end=not failed, error=failed or None)

    def after_fork(_: Any) -> None:
        if not probes.recorder.active:
            # A rank, or the worker of a loader, which will record nothing.
            owners.add(os.getpid())
            util.Finalize(None, on_exit, exitpriority=100)
            probes.watch()

    sys.excepthook = on_error
    atexit.register(on_exit)
    # Processes of multiprocessing end without atexit, and print their exceptions themselves.
    util.Finalize(None, on_exit, exitpriority=100)
    util.register_after_fork(probes, after_fork)


def is_launcher(words: Sequence[str]) -> bool:
    """Returns whether a Python that was started with these words only starts ranks as other processes."""
    if "--multiprocessing-fork" in words:
        return False
    program = next((place for place, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
    if words[program - 1] == "-m":
        return words[program] in _LAUNCHER_MODULES
    return program > 0 and Path(words[program]).name in _LAUNCHERS


def _prepare(folder: Path, spec: Spec) -> None:
    """Prepares torch, before anything else is installed: with emulated GPUs, or as it is."""
    if spec.gpus:
        from ddp_doctor.emulation.cuda import install

        install(spec.gpus)
    if spec.target.command:
        from ddp_doctor.launch.starters import Starters

        Starters(spec.world_size).install()
    if not spec.gpus:
        # The numbers of processes are those that the program itself names.
        from ddp_doctor.emulation import demand

        demand.watch(folder, spec)


def described(error: BaseException) -> dict[str, Any]:
    """Returns what a record says of an error."""
    trace = "".join(traceback.format_exception(error))
    wrong = isinstance(error, InputError)
    return {"type": type(error).__name__, "message": str(error), "trace": trace, "input": wrong}


def _run_target(spec: Spec, rank: int) -> None:
    target = spec.target
    if target.config:
        from ddp_doctor.launch.lightning_rank import run_config

        run_config(spec)
        return
    found = load_object(target.name)
    if inspect.isclass(found):
        from ddp_doctor.launch.lightning_rank import run_module

        run_module(found, load_object(target.data) if target.data else None, spec)
    elif not callable(found):
        raise InputError(f"{target.name} is a {type(found).__name__}, not a LightningModule or a function.")
    else:
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
            raise InputError(f"{place} has no {name}.")
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
