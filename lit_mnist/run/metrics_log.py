"""The metrics of a run in `metrics.csv` and TensorBoard files, which rank 0 writes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.errors import InputError
from lit_mnist.run.folder import METRICS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Row = dict[str, float]


class Logger(Protocol):
    """The interface of Lightning's loggers."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Logs the metrics of a step."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Logs the configuration."""

    def save(self) -> None:
        """Flushes the logged metrics."""

    def finalize(self, status: str) -> None:
        """Closes the logger."""


class MetricsLog:
    """Writes metrics to `metrics.csv` and TensorBoard files immediately. A new metric adds a column.

    Args:
        folder: The run folder. The rows of a resumed run up to `step` are kept.
        step: The step from which the run resumes.
        columns: Names of the metrics that have a column from the start.
    """

    def __init__(self, folder: Path, step: int = 0, columns: Sequence[str] = ()) -> None:
        self._folder = folder
        self._columns = ["step", "epoch", *columns]
        rows = [row for row in read_metrics(folder) if row["step"] <= step]
        self._columns += sorted({name for row in rows for name in row} - {*self._columns})
        self._rewrite(rows)
        self._tensorboard: SummaryWriter | None = None
        # An interrupted run may have logged steps after the one from which it resumes.
        self._purge_step = step + 1 if step else None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Adds a row, even if the step has one already."""
        assert step is not None
        row: Row = {"step": float(step), **metrics}
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._file.close()
            self._rewrite(read_metrics(self._folder))
        self._file.write(self._values(row))
        self._file.flush()
        if self._tensorboard is None:
            # The import is slow; it must not delay the first step.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._purge_step)
        for name, value in metrics.items():
            if name != "epoch":
                self._tensorboard.add_scalar(name.replace("_", "/", 1), value, step)

    def finalize(self, status: str) -> None:
        """Closes the files."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()

    def _rewrite(self, rows: list[Row]) -> None:
        # Atomically, so that a kill loses no row.
        write_text(self._folder / METRICS, "".join([_line(self._columns), *map(self._values, rows)]))
        self._file = (self._folder / METRICS).open("a", newline="")

    def _values(self, row: Row) -> str:
        return _line([f"{row[name]:.8g}" if name in row else "" for name in self._columns])


def _line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def read_metrics(folder: Path) -> list[Row]:
    """Returns the rows of `metrics.csv` in a run folder, or no rows if the file does not exist.

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
        raise InputError(f"{path} is damaged ({error}): move it away.") from error
    if any("step" not in row for row in rows):
        raise InputError(f"{path} is damaged (a row has no step): move it away.")
    return rows
