"""Claims the run folder for this run, and fills it with the checkpoints that the run starts from.

The folder of a resumed training is locked before its newest checkpoint is chosen: an earlier run may still save there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_mnist.checkpoint.atomic_io import atomic_copy
from lit_mnist.checkpoint.format import BEST, LAST
from lit_mnist.checkpoint.resume import Saved
from lit_mnist.checkpoint.store import CONFIG, find_run_folder
from lit_mnist.cli.parser import Request
from lit_mnist.cli.validate import Validated, resumes_in_place
from lit_mnist.distributed.rank import Rank, launched_from_outside, warn_once
from lit_mnist.errors import InputError
from lit_mnist.experiment.plan import Plan
from lit_mnist.predict import digits
from lit_mnist.profiling.faults import fault_marker
from lit_mnist.run.folder import METRICS, REPORT, RESULT, RunFolder, default_path, was_restarted
from lit_mnist.run.folder_lock import FolderLock
from lit_mnist.run.metrics_log import read_metrics

# New name of a best checkpoint that does not belong to the resumed training.
_ASIDE = "best-put-aside.ckpt"
# A lost rank may still hold the folder when its successor starts.
PATIENCE_SECONDS = 30.0
_WRITES = {
    "train": (CONFIG, RESULT, METRICS, REPORT, "checkpoints"),
    "fit": (CONFIG, RESULT, METRICS, REPORT, "checkpoints"),
    "validate": (CONFIG, RESULT, REPORT),
    "test": (CONFIG, RESULT, REPORT),
    "predict": (digits.TABLE, digits.GRID),
}


@contextmanager
def lock_resumed_folder(request: Request) -> Iterator[FolderLock | None]:
    """Locks the run folder in which a training resumes, and yields the lock; undoes it if the body raises.

    Yields None if there is nothing to lock: for a new training, a folder without checkpoints, and on a process that
    does not write.

    Raises:
        InputError: Another run holds the folder, or it cannot be locked.
    """
    folder = _folder_to_resume(request) if writes_run_folder() else None
    if folder is None:
        yield None
        return
    lock = FolderLock(folder, PATIENCE_SECONDS if resumes_in_place(request) else 0)
    try:
        yield lock
    except BaseException:
        lock.undo()
        raise


def claim(validated: Validated, plan: Plan, lock: FolderLock | None) -> tuple[Path, RunFolder | None]:
    """Returns the path of the run folder, and the claimed folder on the process that writes it.

    Args:
        validated: The validated request.
        plan: Its plan.
        lock: The lock of the folder in which a training resumes.

    Raises:
        InputError: Another run owns the folder, it cannot be written, or the ranks would disagree on its name.
    """
    request, experiment, saved = validated.request, validated.experiment, validated.saved
    origin = find_run_folder(saved.path) if saved and request.trains else None
    path, name = _path(validated, origin)
    if not writes_run_folder():
        return (path or default_path(name)).absolute(), None
    in_place = path is not None and path.resolve() == origin
    restarted = path is not None and request.trains and was_restarted(path)
    begins = path is not None and request.resume == "auto" and not (path / RESULT).exists()
    if path and in_place:
        read_metrics(path)
    folder = RunFolder.claim(
        path,
        name=name,
        writes=_WRITES[request.command],
        folders=("checkpoints", "tensorboard") if request.trains else (),
        resumed=in_place or restarted or begins,
        patience=PATIENCE_SECONDS if restarted else 0,
        lock=lock if lock and path and lock.path.resolve() == path.resolve() else None,
    )
    try:
        if request.trains:
            complete = request.command == "train" and saved is not None and saved.step == plan.total_steps
            _fill(folder, saved, plan, resumes_here=in_place or restarted, complete=complete)
        if request.command != "predict":
            config = experiment.replace("run", dir=None, resume=None, inject=None).to_dict()
            config["trainer"].update(validated.stated)
            folder.write_config(config)
    except OSError as error:
        folder.undo()
        raise InputError(f"The run folder {folder.path} cannot be written: {error.strerror}.") from error
    except InputError:
        folder.undo()
        raise
    return folder.path, folder


def writes_run_folder() -> bool:
    """Returns whether this process writes the run folder."""
    return not launched_from_outside() or Rank.from_environment().is_first


def _folder_to_resume(request: Request) -> Path | None:
    """Returns the run folder in which a training resumes, or None if it writes to a new one."""
    if not request.trains:
        return None
    if resumes_in_place(request):
        folder = Path(str(request.run_dir))
        return folder.absolute() if (folder / "checkpoints").is_dir() else None
    if request.resume in {None, "auto"}:
        return None
    source = Path(str(request.resume))
    try:
        # A run folder, its `checkpoints` folder, or a file in it.
        inside = [source / "checkpoints" / LAST, source / LAST] if source.is_dir() else [source]
        origin = next(filter(None, map(find_run_folder, inside)), None)
        return origin if origin and (request.run_dir is None or Path(request.run_dir).resolve() == origin) else None
    except (OSError, RuntimeError):
        # For example, a link to itself: reading the checkpoint reports it.
        return None


def _path(validated: Validated, origin: Path | None) -> tuple[Path | None, str]:
    """Returns the run folder, the given one or that of the resumed training, and the last part of a new one's name."""
    request, experiment = validated.request, validated.experiment
    chosen = Path(experiment.run.dir) if experiment.run.dir else origin
    every_rank_writes = experiment.run.trace != "none"
    if chosen is None and every_rank_writes and launched_from_outside() and Rank.from_environment().world_size > 1:
        raise InputError("Every rank writes into the run folder: name it to all of them by --run-dir.")
    name = experiment.model.net if request.command == "train" else f"{experiment.model.net}-{request.command}"
    return chosen.absolute() if chosen else None, name


def _fill(folder: RunFolder, saved: Saved | None, plan: Plan, *, resumes_here: bool, complete: bool) -> None:
    """Copies the checkpoints that a training resumes from into its folder; the best one only if it is valid."""
    if not resumes_here:
        fault_marker(folder.path).unlink(missing_ok=True)
    if saved is None:
        if any(folder.checkpoints.glob("*.ckpt")):
            raise InputError(f"Another run has just started in {folder.path}: start this one again.")
        return
    best, last = folder.checkpoints / BEST, folder.checkpoints / LAST
    in_place = saved.is_in(folder.checkpoints)
    if not in_place:
        atomic_copy(saved.path, last)
        if Saved.read(last).section["sha256"] != saved.section["sha256"]:
            raise InputError(f"{saved.path} was replaced by another run while it was read: start this one again.")
        if (beside := saved.path.parent / BEST).is_file():
            atomic_copy(beside, best)
    if not complete and saved.step < plan.steps_per_epoch and not best.exists():
        # No epoch has ended: there are no best weights yet.
        return
    try:
        saved.check_best(best)
    except InputError as error:
        if complete:
            raise InputError(
                f"The training in {folder.path} is complete, but its best weights are not known: test the last ones "
                f"with test --ckpt {last}. {error}"
            ) from error
        message = f"The best weights until step {saved.step} are not known. {error}"
        if in_place and best.exists():
            best.replace(best.with_name(_ASIDE))
            message += f" It is kept as {_ASIDE}."
        best.unlink(missing_ok=True)
        warn_once(f"{message} {BEST} will be the best epoch from here on.")
