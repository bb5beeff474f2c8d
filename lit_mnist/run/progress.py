"""The progress display of a run: a bar on a terminal, otherwise a line every few seconds, both with the time left."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO, TypeVar

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.screen import can_redraw, fitted, has_color
from lit_mnist.distributed.terminal import print_line

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_TO_CLEAR = 1.0
_ECHO = "^C"
_ERASE = "\r\x1b[2K"
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
# Logged values that the display leaves to the files.
_HIDDEN = {"lr", "epoch"}
# Minimal widths of the bar, the remaining time, and the gaps, in characters.
_REST = 4 + 7 + 3


class ProgressDisplay:
    """Displays the progress of a training or an evaluation on rank 0.

    Args:
        total: Optimizer steps, or batches of an evaluation; None if they are not known.
        done: Completed steps of a resumed run.
        unit: What is counted.
    """

    def __init__(self, total: int | None, done: int = 0, unit: str = "step") -> None:
        self._total, self._begin, self._unit = total, done, unit
        self._of_total = "" if total is None else f"/{total}"
        self._bar: Progress | None = None
        self._plain: Any = None
        self._task = TaskID(0)
        self._started = self._last_line = time.monotonic()
        if can_redraw():
            self._plain = None if has_color() else _WithoutEscapes(sys.stdout)
            console = _Console(file=self._plain)
            longest = 9_999_999 if total is None else total
            taken = len(f"{unit} {longest}{self._of_total}") + _REST
            columns: list[ProgressColumn] = [
                TextColumn(
                    f"{unit} {{task.completed}}{self._of_total}", table_column=Column(no_wrap=True, overflow="crop")
                )
            ]
            if console.width >= taken:
                left = TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
                columns += [BarColumn(), _Metrics(console, taken), left]
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("train", total=total, completed=done, metrics=[])
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
            print_line("  ".join((f"{self._unit} {step}{self._of_total}", *texts, *self._time_left(step, now))))

    def _time_left(self, step: int, now: float) -> list[str]:
        if self._total is None or step <= self._begin or step >= self._total:
            return []
        seconds = (now - self._started) / (step - self._begin) * (self._total - step)
        return [f"{describe_time(seconds)} left"]

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(fitted(text), highlight=False, markup=False, soft_wrap=True)
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
        if self._plain:
            self._plain.is_muted = True
        # In a thread, because the interrupted thread may hold a lock that rich needs.
        clearing = threading.Thread(target=bar.stop, daemon=True)
        clearing.start()
        clearing.join(_SECONDS_TO_CLEAR)
        with suppress(OSError):
            if self._plain:
                os.write(1, f"\r{' ' * bar.console.width}\r".encode())
            elif clearing.is_alive():
                os.write(1, b"\r\x1b[2K\x1b[?25h")


def describe_time(seconds: float) -> str:
    """Returns a duration as `0:07`, `12:30` or `1:02:45`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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


def with_bar(batches: Iterable[T], total: int) -> Iterator[T]:
    """Yields batches, and displays how many of the total are complete; the display disappears at the end."""
    display = ProgressDisplay(total, unit="batch")
    RANK_STATUS.clear_display = display.clear
    try:
        for number, batch in enumerate(batches, start=1):
            yield batch
            display.update(number, {})
    finally:
        display.clear()


class _Console(Console):
    """A terminal with free last columns: the echo of Ctrl-C would otherwise wrap to a line that the bar keeps."""

    @property  # type: ignore[misc] # nobody sets it
    def size(self) -> ConsoleDimensions:
        """Size of the usable area."""
        width, height = super().size
        return ConsoleDimensions(max(1, width - len(_ECHO)), height)


class _WithoutEscapes:
    """A terminal that gets a bar of one line without escape codes: the next state is written over the last one.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_muted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text without its escape codes; a line that would be erased is covered with spaces."""
        if not self.is_muted:
            blank = f"\r{' ' * max(1, shutil.get_terminal_size().columns - 1)}\r"
            self._stream.write(_ESCAPE.sub("", text.replace(_ERASE, blank)))
        return len(text)


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
