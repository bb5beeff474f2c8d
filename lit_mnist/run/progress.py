"""The progress display of a training: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from lit_mnist.distributed.terminal import print_line

_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_TO_CLEAR = 1.0
_ECHO = "^C"
# Minimal widths of the bar, the remaining time, and the gaps, in characters.
_REST = 4 + 7 + 3


class ProgressDisplay:
    """Displays the progress of a training on rank 0.

    Args:
        total_steps: Optimizer steps of the run.
        done: Completed steps of a resumed run.
    """

    def __init__(self, total_steps: int, done: int = 0) -> None:
        self.total_steps = total_steps
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = time.monotonic()
        if sys.stdout.isatty():
            console = _Console()
            taken = len(f"step {total_steps}/{total_steps}") + _REST
            columns: list[ProgressColumn] = [
                TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True, overflow="crop"))
            ]
            if console.width >= taken:
                left = TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
                columns += [BarColumn(), _Metrics(console, taken), left]
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("train", total=total_steps, completed=done, metrics=[])
            self._bar.start()

    def update(self, step: int, loss: float, accuracy: float, images_per_s: float | None) -> None:
        """Displays the metrics of a step."""
        metrics = [f"loss {loss:.4f}", f"batch accuracy {accuracy:.2%}"]
        if images_per_s:
            metrics.append(f"{images_per_s:,.0f} images/s")
        if self._bar:
            self._bar.update(self._task, completed=step, metrics=metrics)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print_line("  ".join((f"step {step}/{self.total_steps}", *metrics)))

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print_line(text)

    def close(self) -> None:
        """Stops the bar; later output appears below it."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def clear(self) -> None:
        """Removes the bar from the terminal before the final message. A signal handler may call it."""
        if not self._bar:
            return
        bar, self._bar = self._bar, None
        bar.live.transient = True
        # In a thread, because the interrupted thread may hold a lock that rich needs.
        clearing = threading.Thread(target=bar.stop, daemon=True)
        clearing.start()
        clearing.join(_SECONDS_TO_CLEAR)
        if clearing.is_alive():
            with suppress(OSError):
                os.write(1, b"\r\x1b[2K\x1b[?25h")


class _Console(Console):
    """A terminal with free last columns: the echo of Ctrl-C would otherwise wrap to a line that the bar keeps."""

    @property  # type: ignore[misc] # nobody sets it
    def size(self) -> ConsoleDimensions:
        """Size of the usable area."""
        width, height = super().size
        return ConsoleDimensions(max(1, width - len(_ECHO)), height)


class _Metrics(ProgressColumn):
    """Displays the metrics that fit into the line.

    Args:
        console: The terminal, whose width may change.
        taken: Width of the other parts of the line, in characters.
    """

    def __init__(self, console: Console, taken: int) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._console, self._taken = console, taken

    def render(self, task: Task) -> Text:
        """Returns the metrics that fit."""
        metrics = list(task.fields["metrics"])
        while metrics and len("  ".join(metrics)) > self._console.width - self._taken:
            metrics.pop()
        return Text("  ".join(metrics))
