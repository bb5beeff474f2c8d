"""The signals that stop a run: obeyed at once, except while a training may still save what it has.

It imports nothing of weight, so that a program can listen before it imports the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from lit_mnist.distributed.terminal import print_stop
from lit_mnist.errors import InputError

# SIGUSR1 is how Slurm and others warn of a time limit that comes; SIGHUP tells that the terminal is gone.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """What this process has been told; the one object of it is `STOP`.

    Attributes:
        received: The first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._deferred = False
        self._end: Callable[[signal.Signals], object] = end_process

    def listen(self, end: Callable[[signal.Signals], object] | None = None) -> None:
        """Takes over the signals of this process, those included that came to it while they were blocked.

        Args:
            end: Ends the process where a signal is obeyed at once; by default with a message and the promised code.
        """
        # A forked process begins with what its parent knew.
        self.received, self._deferred, self._end = None, False, end or end_process
        self.register()

    def register(self) -> None:
        """Takes over the signals again, where a library has taken them."""
        for signum in STOPPING:
            # nohup has it ignored, so that the program outlives its terminal.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._come)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def _come(self, signum: int, _: object) -> None:
        self.received = self.received or signal.Signals(signum)
        # An exception could be swallowed by the code that it meets; a collective here could wait for ever.
        if not self._deferred:
            self._end(self.received)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Leaves a signal that comes to the body, which looks at `received` where it may stop."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.received:
            self._end(self.received)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Leaves a signal that comes to the body altogether, as a launcher does, which lets its ranks end first."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before


def end_process(signum: signal.Signals) -> NoReturn:
    """Ends this process with the promised exit code, and on rank 0 with a message."""
    # The terminal may be gone.
    with suppress(Exception):
        if os.environ.get("RANK", "0") == "0":
            print_stop(f"Stopped by {signum.name}.", signum)
        sys.stdout.flush()
    os._exit(128 + signum)


def signal_name(signum: int) -> str:
    """Returns a signal's name; Python knows the first and the last of the real-time signals only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}" if signum > signal.SIGRTMIN else f"signal {signum}"


def require_main_thread() -> None:
    """Rejects a start of ranks from another thread than the main one.

    The kernel would kill the ranks when that thread ends, and Python gives signals to the main thread alone.

    Raises:
        InputError: This is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "Ranks can be started from the main thread only: they end with the thread that has started them. From "
            "another thread use lit_mnist.cli.api.train, which starts a process of its own."
        )


@contextmanager
def blocked() -> Iterator[None]:
    """Lets signals wait, also in processes that are started meanwhile, until those listen."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


STOP = StopSignals()
