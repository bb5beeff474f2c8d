"""The checkpoint files of a run: the last one, the best one, and older ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_mnist.checkpoint.atomic_io import atomic_link
from lit_mnist.checkpoint.format import BEST, LAST, read_checkpoint
from lit_mnist.errors import InputError

# The resolved configuration, which marks a run folder.
CONFIG = "config.yaml"


class CheckpointFolder:
    """Writes the checkpoints of a run. At any time a valid checkpoint exists.

    Args:
        path: The `checkpoints` folder of the run.
        keep: Number of newest checkpoints to keep in addition to the best one.
        last_step: The step of the last checkpoint, if it is known to be valid.
    """

    def __init__(self, path: Path, *, keep: int, last_step: int | None = None) -> None:
        self.path, self.keep = path, keep
        self._last_step = last_step

    def put(self, write: Callable[[Path], None], step: int, *, is_best: bool) -> None:
        """Writes a checkpoint as the last one and, with a link, the best one.

        Args:
            write: Writes the checkpoint to a file.
            step: Number of optimizer steps.
            is_best: Whether it is also the best checkpoint.

        Raises:
            InputError: The checkpoint cannot be written; earlier checkpoints remain.
            OSError: An older checkpoint cannot be linked or removed.
        """
        last, best = self.path / LAST, self.path / BEST
        if self.keep > 1 and self._last_step is not None and self._last_step < step and last.exists():
            # Whether the link or the write below reaches the disk first, the last checkpoint is valid.
            atomic_link(last, self.path / _older_name(self._last_step), flush=False)
        if is_best:
            # The best first: a run that is killed between the two writes then resumes before this epoch.
            write(best)
            atomic_link(best, last)
        else:
            write(last)
        self._last_step = step
        older = _older(self.path)
        # Checkpoints of later steps were discarded when the run resumed from an earlier checkpoint.
        kept = [path for path in older if _step_in(path.name) < step][: self.keep - 1]
        for path in set(older) - set(kept):
            path.unlink()


def _older_name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def _step_in(name: str) -> int:
    """Returns the step in a name from `_older_name`, or -1 for any other name."""
    found = re.fullmatch(r"step-(\d+)\.ckpt", name)
    return int(found[1]) if found and name == _older_name(int(found[1])) else -1


def _older(folder: Path) -> list[Path]:
    """Returns the older checkpoints, newest first."""
    written = [path for path in folder.glob("step-*.ckpt") if _step_in(path.name) >= 0]
    return sorted(written, key=lambda path: _step_in(path.name), reverse=True)


class Found(NamedTuple):
    """A valid checkpoint and its number of optimizer steps."""

    path: Path
    step: int


def find_newest_valid(place: Path, report: Callable[[str], None]) -> Found | None:
    """Returns the newest valid checkpoint of a run, or None if there is none.

    Args:
        place: A run folder, or its `checkpoints` folder.
        report: Receives a message for each damaged checkpoint that is skipped.
    """
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    # The best checkpoint may have any age. After a valid one, the older ones need not be read.
    found: list[Found] = []
    for path in (folder / LAST, *_older(folder), folder / BEST):
        if not path.is_file() or (found and path.name not in {LAST, BEST}):
            continue
        try:
            step = read_checkpoint(path).get("global_step")
            if not isinstance(step, int):
                raise InputError(f"{path} is not a checkpoint of a run: it has no step.")
        except InputError as error:
            report(f"{error} It is skipped.")
            continue
        found.append(Found(path, step))
        if path.name == LAST:
            break
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)


def find_run_folder(checkpoint: Path) -> Path | None:
    """Returns the run folder that contains a checkpoint, or None if it is not in one."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / CONFIG).exists() else None
