"""The errors that end an examination, each with its exit code. Imports no torch."""

import signal


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
