"""Output to the terminal, with control characters escaped.

Python's `print` raises an error if the reader of a pipe has exited (`| head -1`, a killed `tee`) or the disk is full.
This must not end a training: see `guard_streams`.
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

from lit_mnist.distributed.screen import fitted, has_color, labelled
from lit_mnist.errors import LitMnistError, StoppedError

# Control characters except the newline (C0, DEL, C1), and surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NAMES = {"stdout": (1, "standard output"), "stderr": (2, "standard error")}

Report = Callable[[str], None]


def escape_control(text: str) -> str:
    r"""Returns a text with its control characters except newlines escaped (such as `\x1b`).

    Messages may quote untrusted text, such as the keys of a checkpoint, which must not control the terminal.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def print_line(text: str = "") -> None:
    """Prints a note, a warning or a summary to standard output."""
    print(fitted(escape_control(text)), flush=True)


def print_error(text: str) -> None:
    """Prints an error to standard error."""
    print(fitted(escape_control(text), sys.stderr), file=sys.stderr, flush=True)


def print_labelled(label: str, text: str) -> None:
    """Prints a line of a result, or a command to type next, under one of the labels that all commands share."""
    print_line(labelled(label, text))


def print_stop(text: str, signum: int) -> None:
    """Prints that a signal has ended the command. A signal handler may call it.

    Ctrl-C is not an error. On a terminal the message replaces the echoed `^C`.
    """
    interrupted = signum == signal.SIGINT
    line = escape_control(text if interrupted else f"error: {text}") + "\n"
    if interrupted and os.isatty(2):
        # A bar that was being drawn may have hidden the cursor.
        line = ("\r\x1b[2K\x1b[?25h" if has_color() else "\n") + line
    with suppress(OSError):
        os.write(2, line.encode())


def print_failure(error: LitMnistError, advice: str = "", report: Report = print_error) -> None:
    """Prints the error that ends a command, followed by advice on how to continue."""
    if isinstance(error, StoppedError):
        print_stop(f"{error}{advice}", error.signum)
    else:
        report(f"error: {error}{advice}")


def display_path(path: Path) -> str:
    """Returns a path for messages, relative if it is below the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def clear_bar() -> None:
    """Clears the progress bar of a lost rank, and shows the cursor that the rank has hidden."""
    with suppress(OSError, ValueError):
        if has_color():
            os.write(sys.stdout.fileno(), b"\r\x1b[2K\x1b[?25h")


class GuardedStream:
    """A standard stream that is redirected to /dev/null if it cannot be written, instead of raising an OSError.

    Args:
        stream: The stream.
        name: Its name in the message.
        report: Receives the message when the stream is redirected.
    """

    def __init__(self, stream: TextIO, name: str, report: Report | None) -> None:
        self._stream, self._name = stream, name
        self.report = report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes or drops a text, and returns its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._redirect(error)
            return len(text)

    def flush(self) -> None:
        """Writes or drops the buffered text."""
        try:
            self._stream.flush()
        except OSError as error:
            self._redirect(error)

    def _redirect(self, error: OSError) -> None:
        # The buffered text also goes to /dev/null.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        with suppress(OSError):
            self._stream.flush()
        if self.report:
            self.report(f"can no longer write its {self._name} ({error.strerror}), and continues without it.")


def guard_streams(report: Report | None = None) -> None:
    """Replaces standard output and standard error by a `GuardedStream`.

    A stream that is closed at the start is opened to /dev/null. Otherwise the next file that is opened would get its
    file descriptor and receive the output.

    Args:
        report: Receives the message when a stream is redirected. The message has no subject: "can no longer ...".
    """
    for attribute, (descriptor, name) in _NAMES.items():
        stream = getattr(sys, attribute)
        if stream is None:
            _open_null(descriptor)
            stream = Path(os.devnull).open("w")  # noqa: SIM115 (open as long as the process)
        if isinstance(stream, GuardedStream):
            stream.report = report
        else:
            setattr(sys, attribute, cast(TextIO, GuardedStream(stream, name, report)))


def _open_null(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
