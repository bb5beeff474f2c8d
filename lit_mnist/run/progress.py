"""The progress display of a training: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from lit_mnist.distributed.terminal import print_line

_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_TO_CLEAR = 1.0
_ECHO = "^C"
# Logged values that the display leaves to the files.
_HIDDEN = {"lr", "epoch"}
# Minimal widths of the bar, the remaining time, and the gaps, in characters.
_REST = 4 + 7 + 3


class ProgressDisplay:
    """Displays the progress of a training on rank 0.

    Args:
        total_steps: Optimizer steps of the run; None if they are not known.
        done: Completed steps of a resumed run.
    """

    def __init__(self, total_steps: int | None, done: int = 0) -> None:
        self._of_total = "" if total_steps is None else f"/{total_steps}"
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = time.monotonic()
        if sys.stdout.isatty():
            console = _Console()
            longest = 9_999_999 if total_steps is None else total_steps
            taken = len(f"step {longest}{self._of_total}") + _REST
            columns: list[ProgressColumn] = [
                TextColumn("step {task.completed}" + self._of_total, table_column=Column(no_wrap=True, overflow="crop"))
            ]
            if console.width >= taken:
                left = TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
                columns += [BarColumn(), _Metrics(console, taken), left]
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("train", total=total_steps, completed=done, metrics=[])
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Displays the metrics of a step, by the names under which they are logged."""
        texts = [_describe(name, value) for name, value in metrics.items() if value is not None and name not in _HIDDEN]
        if self._bar:
            self._bar.update(self._task, completed=step, metrics=texts)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print_line("  ".join((f"step {step}{self._of_total}", *texts)))

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


def describe_epoch(
    epoch: int, epochs: int | None, step: int, metrics: Mapping[str, float | None], *, is_best: bool
) -> str:
    """Returns the line of an epoch that has ended.

    Args:
        epoch: The epoch, from 0.
        epochs: Epochs of the run; None if they are not known.
        step: Optimizer steps so far.
        metrics: Metrics by the names under which they are logged.
        is_best: Whether the epoch is the best so far.
    """
    texts = [f"epoch {epoch + 1}" + ("" if epochs is None else f"/{epochs}"), f"step {step}"]
    split = ""
    for name, value in metrics.items():
        if value is not None:
            words = _words(name)
            # The split is stated with its first metric.
            texts.append(_describe(name, value, words[1:] if split and words[0] == split else words))
            split = "validation" if words[0] == "validation" else ""
    return "  ".join([*texts, *(["best so far"] if is_best else [])])


def _words(name: str) -> list[str]:
    first, *rest = re.split(r"[_/]", name) or [name]
    return ["validation" if first in {"val", "valid"} else first, *rest]


def _describe(name: str, value: float, words: list[str] | None = None) -> str:
    if name == "images_per_s":
        return f"{value:,.0f} images/s"
    if words is None:
        # Those of a step are of its batch.
        words = _words(name.removeprefix("train_"))
        words = ["batch", *words] if words[-1] == "accuracy" else words
    share = words[-1] in {"accuracy", "acc", "iou"} and 0 <= value <= 1
    return f"{' '.join(words)} {value:.2%}" if share else f"{' '.join(words)} {value:.4f}"


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
