"""Claims the run folder for this run, and fills it with the checkpoints that the run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.atomic_io import atomic_copy
from lit_mnist.checkpoint.format import BEST, LAST
from lit_mnist.checkpoint.saved import Saved
from lit_mnist.checkpoint.store import CONFIG
from lit_mnist.cli.resume import PATIENCE_SECONDS, Start, origin_of, writes_run_folder
from lit_mnist.distributed.rank import Rank, launched_from_outside, warn_once
from lit_mnist.errors import InputError
from lit_mnist.profiling.faults import fault_marker
from lit_mnist.run.folder import METRICS, REPORT, RESULT, RunFolder, default_path, was_restarted
from lit_mnist.run.folder_lock import FolderLock
from lit_mnist.run.metrics_log import read_metrics

# New name of a best checkpoint that does not belong to the resumed training run.
_OTHER_BEST = "best-of-another-training.ckpt"


@dataclass(frozen=True)
class Output:
    """What a run writes into its folder.

    Attributes:
        name: Last part of the name of a new folder.
        config: The resolved configuration.
        predictions: Names of the files of the command `predict`.
        complete: Whether the resumed training run is complete, so that only its best weights are tested.
        every_rank_writes: Whether ranks other than the first write into the folder.
    """

    name: str
    config: Mapping[str, Any]
    predictions: tuple[str, ...]
    complete: bool = False
    every_rank_writes: bool = False


def claim(start: Start, saved: Saved | None, output: Output, lock: FolderLock | None) -> tuple[Path, RunFolder | None]:
    """Returns the path of the run folder, and the claimed folder on the process that writes it.

    Args:
        start: The request.
        saved: The checkpoint to start from, or None.
        output: What the run writes.
        lock: The lock of the folder in which a training run resumes.

    Raises:
        InputError: Another run owns the folder, it cannot be written, or the ranks would disagree on its name.
    """
    origin = origin_of(start, saved)
    path = _path(start, origin, output)
    if not writes_run_folder():
        return (path or default_path(output.name)).absolute(), None
    in_place = path is not None and path.resolve() == origin
    restarted = path is not None and start.trains and was_restarted(path)
    begins = path is not None and start.resume == "auto" and not (path / RESULT).exists()
    if path and in_place:
        read_metrics(path)
    folder = RunFolder.claim(
        path,
        name=output.name,
        writes=_writes(start, output),
        folders=("checkpoints", "tensorboard") if start.trains else (),
        resumed=in_place or restarted or begins,
        patience=PATIENCE_SECONDS if restarted else 0,
        lock=lock if lock and path and lock.path.resolve() == path.resolve() else None,
    )
    try:
        if start.trains:
            _fill(folder, saved, resumes_here=in_place or restarted, complete=output.complete)
        if start.command != "predict":
            folder.write_config(dict(output.config))
    except OSError as error:
        folder.undo()
        raise InputError(f"The run folder {folder.path} cannot be written: {error.strerror}.") from error
    except InputError:
        folder.undo()
        raise
    return folder.path, folder


def _writes(start: Start, output: Output) -> tuple[str, ...]:
    """Returns the files that must not exist yet in the folder of a new run."""
    if start.command == "predict":
        return output.predictions
    return (CONFIG, RESULT, METRICS, REPORT, "checkpoints") if start.trains else (CONFIG, RESULT, REPORT)


def _path(start: Start, origin: Path | None, output: Output) -> Path | None:
    """Returns the run folder: the given one, that of the resumed training run, or None for a new one."""
    chosen = Path(start.run_dir) if start.run_dir else origin
    several = launched_from_outside() and Rank.from_environment().world_size > 1
    if chosen is None and output.every_rank_writes and several:
        raise InputError("Every rank writes into the run folder: give the same --run-dir to all of them.")
    return chosen.absolute() if chosen else None


def _fill(folder: RunFolder, saved: Saved | None, *, resumes_here: bool, complete: bool) -> None:
    """Copies the checkpoints that a training run resumes from into its folder; the best one only if it is valid."""
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
        if type(saved).read(last).sha256 != saved.sha256:
            raise InputError(f"{saved.path} was replaced by another run while it was read: start this one again.")
        if (beside := saved.path.parent / BEST).is_file():
            atomic_copy(beside, best)
    if not best.exists() and (saved.best is None or (saved.epoch == 0 and not complete)):
        # The run keeps no best weights, or no epoch has ended.
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
            best.replace(best.with_name(_OTHER_BEST))
            message += f" It is kept as {_OTHER_BEST}."
        best.unlink(missing_ok=True)
        warn_once(f"{message} {BEST} will be the best epoch from here on.")
