"""Claims the run folder of a job, and puts there what it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lit_mnist.checkpoint.atomic_io import atomic_copy
from lit_mnist.checkpoint.format import BEST, LAST
from lit_mnist.checkpoint.resume import Saved
from lit_mnist.checkpoint.store import CONFIG, run_folder_of
from lit_mnist.cli.parser import Request
from lit_mnist.distributed.rank import Rank, launched_from_outside, warn_once
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.predict import digits, segmentation
from lit_mnist.profiling.faults import fault_marker
from lit_mnist.run.folder import METRICS, REPORT, RESULT, RunFolder, default_path, lock_folder, was_restarted
from lit_mnist.run.metrics_log import read_metrics

# Where a best checkpoint is kept that is not the best of the training in its folder.
_ASIDE = "best-put-aside.ckpt"
# A rank of before may still hold the folder when its successor is there already.
_SECONDS_TO_LET_GO = 30.0
_WRITES = {
    "train": (CONFIG, RESULT, METRICS, REPORT, "checkpoints"),
    "fit": (CONFIG, RESULT, METRICS, REPORT, "checkpoints"),
    "validate": (CONFIG, RESULT, REPORT),
    "test": (CONFIG, RESULT, REPORT),
    "predict": (digits.TABLE, digits.GRID, segmentation.MASKS, segmentation.OVERLAYS),
}


def continues_in_place(request: Request) -> bool:
    """Returns whether a run continues with what it finds in its folder, since it was begun there before."""
    return request.run_dir is not None and (request.resume == "auto" or was_restarted(Path(request.run_dir)))


@contextmanager
def locked_to_resume(request: Request) -> Iterator[IO[str] | None]:
    """Locks the run folder that a training continues in, before anybody looks for its newest checkpoint.

    A run of before may still be saving there. Gives the lock, which is let go where the body raises, or None where
    there is nothing to lock: a folder without checkpoints, a training that begins, or a process that does not write.

    Raises:
        InputError: Another run holds the folder, or it cannot be locked.
    """
    place = _to_resume(request)
    if place is None or (launched_from_outside() and not Rank.from_environment().is_first):
        yield None
        return
    lock = lock_folder(place, _SECONDS_TO_LET_GO if continues_in_place(request) else 0)
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


def _to_resume(request: Request) -> Path | None:
    """Returns the run folder that a training continues in, or None where it begins or continues in a new folder."""
    if not request.trains:
        return None
    if continues_in_place(request):
        place = Path(str(request.run_dir))
        return place.absolute() if (place / "checkpoints").is_dir() else None
    if request.resume in {None, "auto"}:
        return None
    source = Path(str(request.resume))
    try:
        # As a run folder, its `checkpoints` folder, or a file in it.
        inside = [source / "checkpoints" / LAST, source / LAST] if source.is_dir() else [source]
        origin = next(filter(None, map(run_folder_of, inside)), None)
        chosen = request.run_dir
        return origin if origin and (chosen is None or Path(chosen).resolve() == origin) else None
    except (OSError, RuntimeError):
        # Such as a link to itself: whoever reads the checkpoint says so.
        return None


def claim_folder(
    request: Request,
    experiment: Experiment,
    saved: Saved | None,
    lock: IO[str] | None,
    stated: Mapping[str, Any],
) -> tuple[Path, RunFolder | None]:
    """Returns the run folder's path, and on the process that writes the claimed folder.

    Args:
        request: The command request.
        experiment: The experiment.
        saved: The checkpoint that the job begins with.
        lock: The lock of the folder that the checkpoint was found in, where the training continues there.
        stated: What the configuration says of the further options of Lightning's Trainer.

    Raises:
        InputError: The folder is another run's, cannot be written, or has a name that not all ranks know.
    """
    checkpoint = saved.path if saved else None
    trains = request.trains
    origin = run_folder_of(checkpoint) if checkpoint and trains else None
    chosen = Path(experiment.run.dir) if experiment.run.dir else origin
    name = experiment.model.net if request.command == "train" else f"{experiment.model.net}-{request.command}"
    writes = not launched_from_outside() or Rank.from_environment().is_first
    writes_masks = request.command == "predict" and experiment.data.task.pixelwise
    each_writes = experiment.run.trace != "none" or writes_masks
    if chosen is None and each_writes and launched_from_outside() and Rank.from_environment().world_size > 1:
        raise InputError("Every rank writes into the run folder: name it to all of them by --run-dir.")
    path = (chosen or default_path(name, make=writes)).absolute()
    if not writes:
        return path, None
    again = origin is not None and path.resolve() == origin
    restarted = trains and was_restarted(path)
    if again:
        read_metrics(path)
    folder = RunFolder.claim(
        path,
        writes=_WRITES[request.command],
        folders=("checkpoints", "tensorboard") if trains else (),
        resumed=again or restarted or (request.resume == "auto" and not (path / RESULT).exists()),
        patience=_SECONDS_TO_LET_GO if restarted else 0,
        lock=lock if lock and Path(lock.name).resolve().parent == path.resolve() else None,
    )
    try:
        if trains:
            _fill(folder, saved, goes_on_here=again or restarted)
        if request.command != "predict":
            config = experiment.replace("run", dir=None, resume=None, inject=None).to_dict()
            config["trainer"].update(stated)
            folder.write_config(config)
    except OSError as error:
        folder.release()
        raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error
    except InputError:
        folder.release()
        raise
    return path, folder


def _fill(folder: RunFolder, saved: Saved | None, *, goes_on_here: bool) -> None:
    """Puts the checkpoints that a training continues from into its folder, the best only where it is known.

    Raises:
        InputError: Another run has changed its checkpoints since they were read.
    """
    if not goes_on_here:
        fault_marker(folder.path).unlink(missing_ok=True)
    if saved is None:
        if any(folder.checkpoints.glob("*.ckpt")):
            raise InputError(f"Another run has begun in {folder.path} just now: start this one again.")
        return
    best, last = folder.checkpoints / BEST, folder.checkpoints / LAST
    in_place = saved.is_in(folder.checkpoints)
    if not in_place:
        atomic_copy(saved.path, last)
        if Saved.read(last).section["sha256"] != saved.section["sha256"]:
            raise InputError(f"{saved.path} was replaced by another run while it was read: start this one again.")
        if (beside := saved.path.parent / BEST).is_file():
            atomic_copy(beside, best)
    try:
        saved.check_best(best)
    except InputError as error:
        told = f"The best weights until step {saved.step} are not known. {error}"
        if in_place and best.exists():
            best.replace(best.with_name(_ASIDE))
            told += f" It is kept as {_ASIDE}."
        best.unlink(missing_ok=True)
        warn_once(f"{told} {BEST} will be the best epoch from here on.")
