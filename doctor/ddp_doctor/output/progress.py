"""The progress of an examination: on a terminal one line that is drawn again, otherwise a line for each stage.

Imports no torch.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ddp_doctor.output.terminal import has_color, print_text

_SECONDS_BETWEEN_DRAWINGS = 1.0
_ERASE = "\r\x1b[2K"


class Progress:
    """Shows the stage of an examination and the seconds since its begin.

    Args:
        stream: Where it is shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begun = stream, time.monotonic()
        self._stage = ("", 0, 0)
        self._lock = threading.Lock()
        self.redraws = has_color(stream)

    def begin(self, name: str, number: int, total: int) -> None:
        """Shows that a stage begins."""
        if (name, number, total) == self._stage:
            return
        self._stage = (name, number, total)
        if self.redraws:
            self.draw()
        else:
            print_text(self._line(), self._stream)

    def draw(self) -> None:
        """Draws the line again."""
        if self._stage[0]:
            self._write(f"{_ERASE}{self._line()[: shutil.get_terminal_size((100, 24)).columns - 1]}")

    def clear(self) -> None:
        """Removes the line."""
        if self.redraws:
            self._write(_ERASE)

    def _line(self) -> str:
        name, number, total = self._stage
        minutes, seconds = divmod(int(time.monotonic() - self._begun), 60)
        hours, minutes = divmod(minutes, 60)
        so_far = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f"stage {number}/{total}  {name}  {so_far}"

    def _write(self, text: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def shown_progress(stream: TextIO) -> Iterator[Progress]:
    """Shows the progress within the body, and removes its line at the end."""
    progress, ended = Progress(stream), threading.Event()

    def draw() -> None:
        while not ended.wait(_SECONDS_BETWEEN_DRAWINGS):
            progress.draw()

    drawing = threading.Thread(target=draw, daemon=True)
    if progress.redraws:
        drawing.start()
    try:
        yield progress
    finally:
        ended.set()
        if progress.redraws:
            drawing.join()
        progress.clear()
