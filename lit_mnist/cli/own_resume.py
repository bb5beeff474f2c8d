"""Finds the run folder and the checkpoint with which a run of the user's module begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.format import LAST
from lit_mnist.checkpoint.store import CONFIG, Found, find_run_folder
from lit_mnist.cli.claim import PATIENCE_SECONDS, writes_run_folder
from lit_mnist.cli.config_file import read_config_file
from lit_mnist.cli.request import Request
from lit_mnist.distributed.rank import print_once, warn_once
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import InputError
from lit_mnist.experiment import RunSettings, flatten
from lit_mnist.experiment.schema import SEED
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.exact_checkpoint import check_saved
from lit_mnist.run.folder import was_restarted
from lit_mnist.run.folder_lock import FolderLock

# What a resumed run may not change, since its end would no longer be that of an uninterrupted run.
_FIXED = ("model", "data", SEED, "trainer.precision", "trainer.accumulate_grad_batches", "trainer.gradient_clip_val")


def find_folder(request: Request, run: RunSettings) -> tuple[Path | None, Path | None]:
    """Returns the path of the run folder, or None for a new one, and the folder of the run that is resumed."""
    if run.resume == "auto" and not run.dir:
        raise InputError("--resume auto resumes in the folder of --run-dir: give --run-dir, too.")
    path = Path(run.dir).absolute() if run.dir else None
    if not request.trains or not (run.resume or _resumes_here(run)):
        return path, None
    if _resumes_here(run):
        return path, path
    source = Path(str(run.resume)).absolute()
    # A file elsewhere must not turn its folder into a run folder.
    origin = source if (source / CONFIG).exists() else find_run_folder(source / LAST if source.is_dir() else source)
    if path and origin and path.resolve() == origin.resolve():
        origin = path
    return path or origin, origin


def _resumes_here(run: RunSettings) -> bool:
    """Returns whether a training resumes from what it finds in `run.dir`: `--resume auto`, or after a restart."""
    return run.dir is not None and (run.resume == "auto" or was_restarted(Path(run.dir)))


@contextmanager
def lock_resumed(
    request: Request, run: RunSettings, path: Path | None, origin: Path | None
) -> Iterator[FolderLock | None]:
    """Locks the folder in which a training resumes before its newest checkpoint is chosen; undoes it after an error."""
    lock = None
    if request.trains and path and path == origin and path.is_dir() and writes_run_folder():
        lock = FolderLock(path, PATIENCE_SECONDS if _resumes_here(run) else 0)
    try:
        yield lock
    except BaseException:
        if lock:
            lock.undo()
        raise


def find_checkpoint(request: Request, run: RunSettings, origin: Path | None, world_size: int) -> Path | None:
    """Returns the checkpoint to resume from or to evaluate, verified and, if it is resumed, of as many ranks."""
    if not request.trains:
        if not request.checkpoint:
            raise InputError(f"{request.command} needs --ckpt RUN_DIR_OR_CKPT: the trained weights.")
        return _read(Path(request.checkpoint))[0].absolute()
    source = None if run.resume == "auto" else run.resume
    if origin and _resumes_here(run) and list(origin.glob("checkpoints/*.ckpt")):
        source = str(origin)
    if source is None:
        # `--resume auto` and a restart begin a run that has not saved yet.
        return None
    path, checkpoint = _read(Path(source))
    check_saved(checkpoint, world_size)
    print_once(f"note: resuming from {display_path(path)} after step {checkpoint['global_step']}")
    return path.absolute()


def find_newest(place: Path, report: Callable[[str], None]) -> Found | None:
    """Returns the newest valid checkpoint of a run folder, or None."""
    newest = _read_newest(place, report)
    return Found(newest[0], newest[1]["global_step"]) if newest else None


def _read(source: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the path and the content of a checkpoint, or of the newest valid one in a folder."""
    if source.is_dir():
        if found := _read_newest(source, warn_once):
            return found
        raise InputError(f"The folder {source} contains no valid checkpoint.")
    return source, VerifiedCheckpointIO(background=False).load_checkpoint(source)


def _read_newest(place: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    for path in (folder / LAST, *sorted(folder.glob("step-*.ckpt"), reverse=True)):
        if path.is_file():
            try:
                checkpoint = VerifiedCheckpointIO(background=False).load_checkpoint(path)
                if not isinstance(checkpoint.get("global_step"), int):
                    raise InputError(f"{path} is not a checkpoint of a run: it has no step.")
            except InputError as error:
                report(f"{error} It is skipped.")
            else:
                return path, checkpoint
    return None


def check_same(checkpoint: Path, config: dict[str, Any]) -> None:
    """Rejects another model, data or seed than those of the run that is resumed."""
    folder = find_run_folder(checkpoint)
    if folder is None:
        return
    earlier, now = dict(flatten(read_config_file(folder / CONFIG))), dict(flatten(json.loads(json.dumps(config))))
    for key in sorted({*earlier, *now}):
        fixed = any(f"{key}.".startswith(f"{name}.") for name in _FIXED)
        if fixed and earlier.get(key) != now.get(key):
            raise InputError(
                f"The run of {checkpoint} has {key} {earlier.get(key)}, but this one {now.get(key)}: leave it out, or "
                "start a new run."
            )
