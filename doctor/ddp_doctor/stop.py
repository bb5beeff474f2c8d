"""The signals that end an examination, after its processes have been killed. Imports no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_doctor.errors import StoppedError

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_received: list[signal.Signals] = []


@contextmanager
def recorded_signals() -> Iterator[None]:
    """Records signals within the body, which calls `check_signals`; another thread than the main one has none."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup ignores SIGHUP.
    chosen = [signum for signum in _STOPPING if signal.getsignal(signum) != signal.SIG_IGN]
    before = {
        signum: signal.signal(signum, lambda number, _: _received.append(signal.Signals(number))) for signum in chosen
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def check_signals() -> None:
    """Raises a StoppedError if a signal was received."""
    if _received:
        raise StoppedError(_received[0])
