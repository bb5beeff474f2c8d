"""The checkpoints of a run on the disk: the last, the best, and those that were the last before."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lit_mnist.checkpoint.atomic_io import give_name
from lit_mnist.checkpoint.format import BEST, LAST, read_checkpoint, write_checkpoint
from lit_mnist.errors import InputError

# The resolved configuration, by which a run folder is known.
CONFIG = "config.yaml"


class CheckpointFolder:
    """Puts checkpoints into a run's `checkpoints` folder, so that at every moment a sound one is there.

    Args:
        path: The folder.
        keep: Newest checkpoints to keep, beside the best.
        last_step: The step of the last one, where it is known to be sound.
    """

    def __init__(self, path: Path, *, keep: int, last_step: int | None = None) -> None:
        self.path, self.keep = path, keep
        self._last_step = last_step

    def put(self, checkpoint: Mapping[str, Any], step: int, *, is_best: bool) -> None:
        """Writes a checkpoint once, under all its names; the last one before it becomes an older one.

        Args:
            checkpoint: See `write_checkpoint`.
            step: Its optimizer steps.
            is_best: Whether it is the best so far, too.

        Raises:
            InputError: It cannot be written; what was there still is.
            OSError: An older one cannot be renamed or removed.
        """
        last, best = self.path / LAST, self.path / BEST
        if self.keep > 1 and self._last_step is not None and self._last_step < step and last.exists():
            give_name(last, self.path / _older_name(self._last_step))
        if is_best:
            # The best first: were the run killed between the two, it would go on from before this epoch.
            write_checkpoint(best, checkpoint)
            give_name(best, last)
        else:
            write_checkpoint(last, checkpoint)
        self._last_step = step
        older = [path for path in _older(self.path) if _step_in(path.name) < step]
        # Later ones are of a future that was given up when the run went on from before.
        for path in set(_older(self.path)) - set(older[: self.keep - 1]):
            path.unlink()


def _step_of(path: Path) -> int:
    """Returns the optimizer steps of a checkpoint.

    Raises:
        InputError: It is damaged, or none of a run.
    """
    step = read_checkpoint(path).get("global_step")
    if not isinstance(step, int):
        raise InputError(f"{path} is not a checkpoint of a run: it does not tell its step.")
    return step


def _older_name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def _step_in(name: str) -> int:
    """Returns the step that `_older_name` has put into a name, or -1 for a file that somebody else has named."""
    found = re.fullmatch(r"step-(\d+)\.ckpt", name)
    return int(found[1]) if found and name == _older_name(int(found[1])) else -1


def _older(folder: Path) -> list[Path]:
    """Returns the checkpoints that are not the last ones any more, the newest first."""
    written = [path for path in folder.glob("step-*.ckpt") if _step_in(path.name) >= 0]
    return sorted(written, key=lambda path: _step_in(path.name), reverse=True)


class Found(NamedTuple):
    """A sound checkpoint, and its optimizer steps."""

    path: Path
    step: int


def newest_valid(place: Path, report: Callable[[str], None]) -> Found | None:
    """Returns the newest sound checkpoint of a run, or None where there is none.

    Args:
        place: A run folder, or its `checkpoints` folder.
        report: Is told of each damaged one that is passed over.
    """
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    # The best may be newer than the older ones, or older; what is older than a sound one need not be read.
    candidates = [path for path in (folder / LAST, *_older(folder), folder / BEST) if path.is_file()]
    found: list[Found] = []
    for path in candidates:
        if found and path.name not in {LAST, BEST}:
            continue
        try:
            found.append(Found(path, _step_of(path)))
        except InputError as error:
            report(f"{error} It is passed over.")
            continue
        if path.name == LAST:
            break
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)


def run_folder_of(checkpoint: Path) -> Path | None:
    """Returns the run folder that a checkpoint lies in, or None where it lies elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / CONFIG).exists() else None
