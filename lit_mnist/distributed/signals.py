"""The signals that stop a run: during the training after a checkpoint, otherwise at once.

This module imports neither torch nor Lightning, so that a program can install the handlers before it imports them.
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

# Slurm sends SIGUSR1 before a time limit. SIGHUP arrives when the terminal is closed.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# The launcher then kills the ranks that a signal has not stopped.
SECONDS_TO_STOP = 9.0


def end_process(signum: signal.Signals) -> NoReturn:
    """Exits with the code 128 + signal, and prints a message on rank 0."""
    # The terminal may be closed.
    with suppress(Exception):
        if os.environ.get("RANK", "0") == "0":
            print_stop(f"Stopped by {signum.name}.", signum)
        sys.stdout.flush()
    os._exit(128 + signum)


class StopSignals:
    """The handler of the stop signals; its only instance is `STOP`.

    Attributes:
        received_signal: The first signal that this process has received, or None.
    """

    def __init__(self) -> None:
        self.received_signal: signal.Signals | None = None
        self._deferred = False
        self._end: Callable[[signal.Signals], object] = end_process

    def listen(self, end: Callable[[signal.Signals], object] = end_process) -> None:
        """Installs the handlers, and receives the signals that arrived while they were blocked.

        Args:
            end: Ends the process.
        """
        # A forked process inherits the state of its parent.
        self.received_signal, self._deferred, self._end = None, False, end
        self.register()

    def register(self) -> None:
        """Installs the handlers again after a library has replaced them."""
        for signum in STOPPING:
            # nohup ignores SIGHUP, so that the program outlives its terminal.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def ignore(self) -> None:
        """Ignores the signals from now on."""
        for signum in STOPPING:
            signal.signal(signum, signal.SIG_IGN)

    def _handle(self, signum: int, _: object) -> None:
        self.received_signal = self.received_signal or signal.Signals(signum)
        # An exception raised here could be swallowed by any code, and a collective could hang.
        if not self._deferred:
            self._end(self.received_signal)

    @contextmanager
    def record_only(self) -> Iterator[None]:
        """Records signals within the body instead of ending the process. A launcher forwards them to its ranks."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records signals within the body for code that runs in another person's program.

        After it, the program's handlers are back, and receive a signal that the body has left in `received_signal`.
        In a process of this project, which listens already, it is `record_only`. In another thread than the main one,
        which cannot have handlers, it does nothing.
        """
        before = {signum: signal.getsignal(signum) for signum in STOPPING}
        if before[signal.SIGTERM] == self._handle or threading.current_thread() is not threading.main_thread():
            with self.record_only():
                yield
            return
        self.listen()
        try:
            with self.record_only():
                yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            left, self.received_signal = self.received_signal, None
            if left:
                os.kill(os.getpid(), left)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Records signals within the body, which checks `received_signal`, and ends the process after it."""
        with self.record_only():
            yield
        if self.received_signal:
            self._end(self.received_signal)


def signal_name(signum: int) -> str:
    """Returns the name of a signal. Python names only the first and the last real-time signal."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}" if signum > signal.SIGRTMIN else f"signal {signum}"


def require_main_thread() -> None:
    """Raises an InputError unless the calling thread is the main thread.

    The kernel kills the ranks when the thread that started them ends, and Python handles signals in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "Ranks can be started from the main thread only: they end with the thread that started them. In another "
            "thread, call lit_mnist.train, which starts a separate process."
        )


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks the stop signals in this process, and in those started meanwhile until they install their handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


STOP = StopSignals()
