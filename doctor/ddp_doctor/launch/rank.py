"""One rank of a run: installs the probes, runs what is examined as its user would, and writes the record."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError
from ddp_doctor.records.spec import Spec, read

# Programs that start ranks as other processes, and so never train themselves.
_LAUNCHERS = {
    "torchrun", "accelerate", "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"
}  # fmt: skip


def run_rank(folder: Path, spec: Spec) -> int:
    """Runs a target in this process, whose environment names its rank; returns an exit code."""
    rank = int(os.environ["RANK"])
    sys.path.insert(0, str(Path.cwd()))
    if spec.purpose == "bare":
        _run_target(spec, rank)
        return 0
    _prepare(spec)
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
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


def observe(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Observes this Python process, which a command has started with these environment variables.

    The record is written when the process ends, if it has taken part in training.
    """
    spec = read(folder)
    _prepare(spec)
    if is_launcher(sys.orig_argv):
        # The probes would see nothing, and their imports take time.
        return
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec, environment)
    probes.install()

    def on_exit() -> None:
        # What nobody has caught.
        error = getattr(sys, "last_value", None)
        if probes.recorder.active or error:
            # A process of multiprocessing ends with the exception of its function, or exits because of it.
            error = error or sys.exception()
            if isinstance(error, SystemExit):
                error = error.__context__ if error.code else None
            probes.loaders.close()
            probes.end(reached_end=error is None, error=described(error) if error else None)

    def after_fork(_: Any) -> None:
        if not probes.recorder.active:
            # A rank, or the worker of a loader, which will record nothing.
            util.Finalize(None, on_exit, exitpriority=100)
            probes.watch()

    # It is also called at the end of processes of multiprocessing, which print their exceptions themselves.
    util.Finalize(None, on_exit, exitpriority=100)
    util.register_after_fork(probes, after_fork)


def is_launcher(words: Sequence[str]) -> bool:
    """Returns whether a Python that was started with these words only starts ranks as other processes."""
    program = next((word for word in words[1:] if not word.startswith("-")), "")
    return Path(program).name in _LAUNCHERS


def _prepare(spec: Spec) -> None:
    """Prepares torch, before anything else is installed: with emulated GPUs, or as it is."""
    if known := sys.modules.get("lightning_utilities.core.rank_zero"):
        # Lightning asks the environment when it is imported, which was before the fork.
        known.rank_zero_only.rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    if spec.gpus:
        from ddp_doctor.emulation.cuda import install

        # A program that starts a rank per GPU starts the ranks that are run.
        install(spec.world_size)
    if spec.target.command:
        from ddp_doctor.launch.starters import Starters

        Starters(spec.world_size).install()


def described(error: BaseException) -> dict[str, Any]:
    """Returns what a record says of an error."""
    trace = "".join(traceback.format_exception(error))
    wrong = isinstance(error, InputError)
    return {"type": type(error).__name__, "message": str(error), "trace": trace, "input": wrong}


def _run_target(spec: Spec, rank: int) -> None:
    target = spec.target
    found = load_object(target.name)
    if inspect.isclass(found):
        from ddp_doctor.launch.lightning_rank import run_module

        run_module(found, load_object(target.data) if target.data else None, spec.world_size)
    elif not callable(found):
        raise InputError(f"{target.name} is a {type(found).__name__}, not a LightningModule or a function.")
    else:
        found(*([rank, spec.world_size] if takes_rank(found, target.args) else []), *target.args)


def load_object(text: str) -> Any:
    """Imports what `package.module:name` or `path/to/file.py:name` names.

    Raises:
        InputError: It is not of this form, there is no such module or name, or its import ends the process.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InputError(f"{text!r} is not a target: write package.module:name or path/to/file.py:name.")
    module = place
    if place.endswith(".py"):
        # As `python path/to/file.py` does. Workers and spawned processes import it by this name.
        sys.path.insert(0, str(Path(place).parent.resolve()))
        module = Path(place).stem
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise InputError(f"There is no {place}: run the doctor in the folder that contains it.") from error
        raise
    except SystemExit as error:
        raise InputError(
            f"{place} ends the process while it is imported, as a script that reads its own options does: examine its "
            f"command instead, such as ddp-doctor -- torchrun --nproc-per-node 2 {place}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{place} has no {name}.")
        found = getattr(found, part)
    return found


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
