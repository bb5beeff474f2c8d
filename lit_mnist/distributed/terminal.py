"""What the project prints: text that cannot control a terminal, on streams whose failure ends no run.

Python's own `print` raises where the reader of a pipe has left (`| head -1`, a `tee` that was killed) or the disk is
full. A training must not be lost by that: see `guard_streams`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from lit_mnist.errors import LitMnistError, StoppedError

# Control characters but the newline (C0, DEL, C1), and what no encoding can write.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NAMES = {"stdout": (1, "standard output"), "stderr": (2, "standard error")}

Report = Callable[[str], None]


def printable(text: str) -> str:
    r"""Returns a text with its control characters escaped, `\x1b` for one, except for newlines.

    Messages may repeat what a file says, such as a checkpoint's keys: it must not move the cursor, retitle the window
    or hide what stands above.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def print_line(text: str = "") -> None:
    """Prints to standard output; every note, warning and summary of the project goes through here."""
    print(printable(text), flush=True)


def print_error(text: str) -> None:
    """Prints to standard error; every error of the project goes through here."""
    print(printable(text), file=sys.stderr, flush=True)


def print_stop(text: str, signum: int) -> None:
    """Prints that a signal has ended the command; a signal's handler may call it.

    Ctrl-C is a wish, and no error: on a terminal the message takes the line of the `^C` that the terminal has echoed.
    """
    wished = signum == signal.SIGINT
    line = printable(text if wished else f"error: {text}") + "\n"
    if wished and os.isatty(2):
        plain = os.environ.get("TERM", "dumb") == "dumb"
        line = ("\n" if plain else "\r\x1b[2K") + line
    with suppress(OSError):
        os.write(2, line.encode())


def print_failure(error: LitMnistError, advice: str = "", say: Report = print_error) -> None:
    """Prints why a command ends early, and how to continue.

    Args:
        error: Why it ends.
        advice: How to continue.
        say: Prints an error.
    """
    if isinstance(error, StoppedError):
        print_stop(f"{error}{advice}", error.signum)
    else:
        say(f"error: {error}{advice}")


def shown(path: Path) -> str:
    """Returns a path as a user would type it here: relative where it lies below the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


class GuardedStream:
    """A standard stream that turns itself off where it cannot be written, instead of raising an OSError.

    Args:
        stream: The stream.
        name: What it is called in a message.
        report: Is told once that it is turned off.
    """

    def __init__(self, stream: TextIO, name: str, report: Report | None) -> None:
        self._stream, self._name = stream, name
        self.report = report

    def __getattr__(self, name: str) -> Any:
        """Returns whatever else the stream has."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or loses it; returns its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._turn_off(error)
            return len(text)

    def flush(self) -> None:
        """Writes what was kept back, or loses it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        """Sends what comes now, and what the buffers still hold, to nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        with suppress(OSError):
            self._stream.flush()
        if self.report:
            self.report(f"cannot write its {self._name} any more ({error.strerror}), and continues without it.")


def guard_streams(report: Report | None = None) -> None:
    """Lets standard output and error turn themselves off where they cannot be written, for the whole process.

    What libraries and callbacks print is guarded, too. A stream that was closed from the start becomes one to nowhere:
    else the next file that is opened would get its number, and what is printed would be written into it.

    Args:
        report: Is told of a stream that is turned off, by the rest of a sentence on this process.
    """
    for attribute, (descriptor, name) in _NAMES.items():
        stream = getattr(sys, attribute)
        if stream is None:
            _open_to_nowhere(descriptor)
            stream = Path(os.devnull).open("w")  # noqa: SIM115 (it lives as long as the process)
        if isinstance(stream, GuardedStream):
            stream.report = report
        else:
            setattr(sys, attribute, cast(TextIO, GuardedStream(stream, name, report)))


def _open_to_nowhere(descriptor: int) -> None:
    """Opens a descriptor that nobody uses."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
