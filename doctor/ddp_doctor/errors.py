"""The errors that end an examination, each with its exit code. Imports no torch."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class DoctorError(Exception):
    """An expected error, whose message is shown without a traceback."""

    exit_code = 2


class InputError(DoctorError, ValueError):
    """A target, a flag or a place for the report was rejected."""


class StoppedError(DoctorError):
    """A signal has ended the examination; the exit code is 128 + its number, as in a shell."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"Stopped by {signum.name}.")
        self.exit_code = 128 + signum


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean …?` with the most similar of the known names, or nothing if none is similar."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""
