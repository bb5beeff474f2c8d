"""A pseudo-terminal in which a command runs, and the screen that results from its output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from processes import forked

_PART = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n|\x07|[^\x1b\r\n\x07]")


@dataclass
class Terminal:
    """A terminal in which a command runs.

    Attributes:
        master: The end that a user sits at.
        group: The command's process group.
        columns: Its width.
    """

    master: int
    columns: int
    group: int = 0
    _seen: bytearray = field(default_factory=bytearray)

    @property
    def output(self) -> str:
        """The output so far."""
        return self._seen.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        """Presses keys: the kernel turns Ctrl-C (3) into SIGINT for all processes in the foreground, and echoes it."""
        os.write(self.master, keys)

    def screen(self) -> list[str]:
        """Returns the visible lines."""
        return screen(self.output, self.columns)

    def read(self) -> None:
        """Reads until the other end is closed."""
        with suppress(OSError):
            while found := os.read(self.master, 1 << 16):
                self._seen += found


@contextmanager
def in_terminal(work: Callable[[], int], folder: Path, columns: int) -> Iterator[Terminal]:
    """Runs `work` in a forked process with a terminal of `columns` columns, as a shell does."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    name = os.ttyname(slave)

    def seated() -> int:
        os.environ["TERM"] = "xterm"
        os.close(master)
        # The first terminal that a session leader opens becomes its controlling terminal.
        opened = os.open(name, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(opened, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        return work()

    terminal = Terminal(master, columns)
    reader = threading.Thread(target=terminal.read)
    with forked(seated, folder) as group:
        terminal.group = group
        reader.start()
        yield terminal
    os.close(slave)
    reader.join(10)
    os.close(master)


def screen(output: str, columns: int) -> list[str]:
    """Returns the lines that a terminal shows for an output of text and cursor movements."""
    lines, row, column = [""], 0, 0
    for found in _PART.finditer(output):
        text, argument, command = found[0], found[1], found[2]
        count = int(argument) if argument and argument.isdigit() else 1
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
        elif command == "A":
            row = max(0, row - count)
        elif command == "K":
            lines[row] = "" if argument == "2" else lines[row][:column]
        elif command is None and text != "\x07":
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]
