"""The errors that end a run, each with its exit code."""


class InputError(ValueError):
    """The input was rejected: one message without a traceback, and exit code 2."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient was infinite or NaN: exit code 4."""


class StoppedError(Exception):
    """A signal stopped the training after its checkpoint was saved: exit code 128 + signal.

    Args:
        signum: The number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
