"""The progress of a comparison: on a terminal one line that is drawn again, otherwise a line for each run."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lit_mnist.distributed.screen import has_color
from lit_mnist.distributed.terminal import clear_bar, print_line
from lit_mnist.run.progress import describe_time

_SECONDS_BETWEEN_DRAWINGS = 1.0


class ComparisonDisplay:
    """Shows which engine runs, and the time since the begin."""

    def __init__(self) -> None:
        self._begun, self._text = time.monotonic(), ""
        self._redraws = has_color()

    def begin(self, text: str) -> None:
        """Shows that a run begins, such as `engine 2/8  raw_ddp  training with a trace`."""
        self._text = text
        if self._redraws:
            self._draw()
        else:
            print_line(self._line())

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draws the line each second within the body. No process may be forked there: a thread draws."""
        if not self._redraws:
            yield
            return
        ended = threading.Event()

        def draw() -> None:
            while not ended.wait(_SECONDS_BETWEEN_DRAWINGS):
                self._draw()

        drawing = threading.Thread(target=draw, daemon=True)
        drawing.start()
        try:
            yield
        finally:
            ended.set()
            drawing.join()

    def clear(self) -> None:
        """Removes the line."""
        if self._redraws:
            clear_bar()

    def _line(self) -> str:
        return f"{self._text}  {describe_time(time.monotonic() - self._begun)}"

    def _draw(self) -> None:
        line = self._line()[: shutil.get_terminal_size((100, 24)).columns - 1]
        with suppress(OSError, ValueError):
            sys.stdout.write(f"\r\x1b[2K{line}")
            sys.stdout.flush()
