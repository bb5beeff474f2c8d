"""The course of a training as `metrics.csv` and TensorBoard files, written by rank 0."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.errors import InputError
from lit_mnist.run.folder import METRICS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = ("step", "epoch", "train_loss", "train_accuracy", "lr", "images_per_s")
Row = dict[str, float]


class MetricsLog:
    """Writes the rows of `metrics.csv`, each as it comes, to the file and for TensorBoard.

    Args:
        folder: The run folder; rows of a resumed run up to `step` are kept.
        step: The step that the run goes on from.
        columns: The figures of a row.
    """

    def __init__(self, folder: Path, step: int = 0, columns: tuple[str, ...] = COLUMNS) -> None:
        self._folder, self._columns = folder, columns
        rows = [row for row in read_metrics(folder) if row["step"] <= step]
        # Rewritten as a whole, so that a kill at this moment does not lose the rows of before.
        write_text(folder / METRICS, "".join(map(self._line, [None, *rows])))
        self._file = (folder / METRICS).open("a", newline="")
        self._tensorboard: SummaryWriter | None = None
        # What an interrupted run has told beyond the step that is gone on from.
        self._purge_step = step + 1 if step else None

    def add(self, row: Row) -> None:
        """Adds the figures of a step; a second row of the same step is another row."""
        self._file.write(self._line(row))
        self._file.flush()
        if self._tensorboard is None:
            # Imported with the first row, since it takes a good part of a second that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._purge_step)
        for name, value in row.items():
            if name not in {"step", "epoch"}:
                self._tensorboard.add_scalar(name.replace("_", "/", 1), value, int(row["step"]))

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()

    def _line(self, row: Row | None) -> str:
        """Returns a row as a line of CSV, or the header for None."""
        names = self._columns
        values = names if row is None else [f"{row[name]:.8g}" if name in row else "" for name in names]
        return ",".join(values) + "\n"


def read_metrics(folder: Path) -> list[Row]:
    """Returns the rows of a run folder's `metrics.csv`, or none where there is none.

    Raises:
        InputError: The file is damaged.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(f"{path} is damaged ({error}): put it aside.") from error
    if any("step" not in row for row in rows):
        raise InputError(f"{path} is damaged (a row has no step): put it aside.")
    return rows
