"""Child processes that must not outlive the examination, and the signals that end it. Imports no torch."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_doctor.errors import StoppedError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_received: list[signal.Signals] = []


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process, which can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Lets the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)


def children_of(pid: int) -> list[int]:
    """Returns the child processes of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found += [int(entry.name)] * (int(fields[1]) == pid)
    return found


def kill_children() -> None:
    """Kills all children of this process, and the orphans that they leave."""
    for _ in range(20):
        left = children_of(os.getpid())
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextmanager
def recorded_signals() -> Iterator[list[signal.Signals]]:
    """Yields the signals within the body, which calls `check_signals`; another thread than the main one has none."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield _received
        return
    # nohup ignores SIGHUP.
    chosen = [signum for signum in _STOPPING if signal.getsignal(signum) != signal.SIG_IGN]
    before = {
        signum: signal.signal(signum, lambda number, _: _received.append(signal.Signals(number))) for signum in chosen
    }
    try:
        yield _received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def check_signals() -> None:
    """Raises a StoppedError if a signal was received."""
    if _received:
        raise StoppedError(_received[0])
