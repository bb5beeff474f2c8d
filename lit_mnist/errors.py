"""The errors that end a run, each with its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LitMnistError(Exception):
    """An expected error, whose message is shown to the user without a traceback."""

    exit_code = 1
    # How to continue; printed below the message.
    advice = ""
    # Whether the ranks had started.
    started = False
    # The training step in which it was raised, from 1; 0 outside the training.
    step = 0


class InputError(LitMnistError, ValueError):
    """A configuration, data, a checkpoint or an output location was rejected."""

    exit_code = 2


class RankLostError(LitMnistError):
    """A rank raised an exception or was killed."""

    exit_code = 3


class NonFiniteError(LitMnistError):
    """A loss or a gradient was infinite or NaN."""

    exit_code = 4


class StoppedError(LitMnistError):
    """The run was stopped by a signal.

    Args:
        message: The message for the user.
        signum: The signal's number; the exit code is 128 + signum, as in a shell.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum


def require(condition: bool, message: str) -> None:
    """Raises `InputError` with a message unless the condition is true."""
    if not condition:
        raise InputError(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean …?` with the most similar of the known names, or nothing if none is similar."""
    known, last = list(known), name.rsplit(".", 1)[-1]
    # A common section alone, such as `trainer`, does not make two keys similar.
    close = difflib.get_close_matches(name, known, cutoff=0.6)
    found = [key for key in close if difflib.get_close_matches(last, [key.rsplit(".", 1)[-1]], cutoff=0.5)]
    if not found:
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        found = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.7)]
    return f"; did you mean {found[0]}?" if found else ""
