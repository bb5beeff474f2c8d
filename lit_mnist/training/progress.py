"""What a run shows while it trains: a bar on a terminal, plain and rare lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lit_mnist.terminal import print_line

_SECONDS_BETWEEN_LINES = 15.0


class ProgressDisplay:
    """Shows the course of a training; made by rank 0 alone.

    Args:
        total_steps: Optimizer steps of the run.
        done: Steps already made, where a run is resumed.
    """

    def __init__(self, total_steps: int, done: int = 0) -> None:
        self.total_steps = total_steps
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = time.monotonic()
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True),
                console=Console(),
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=done, figures="")
            self._bar.start()

    def update(self, step: int, loss: float, accuracy: float, images_per_s: float | None) -> None:
        """Shows the figures of the last steps."""
        figures = f"loss {loss:.4f}  batch accuracy {accuracy:.2%}"
        if images_per_s:
            figures += f"  {images_per_s:,.0f} images/s"
        if self._bar:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print_line(f"step {step}/{self.total_steps}  {figures}")

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print_line(text)

    def close(self) -> None:
        """Ends the bar, so that what is printed next stands below it."""
        if self._bar:
            self._bar.stop()
            self._bar = None
