"""Runs work in a forked process and kills it at a system call of our choice: strace's trick, in thirty lines."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

_TRACEME, _SYSCALL, _SETOPTIONS, _EXITKILL = 0, 24, 0x4200, 0x100000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def run_until(work: Callable[[], object], stop: int | None) -> int | None:
    """Runs `work` in a forked process and kills it at a stop.

    The kernel stops the process before and after each system call.

    Args:
        work: What to do.
        stop: The number of the stop, from 0, at which the process is killed; None for never.

    Returns:
        The number of stops where the work came to its end, else None.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _LIBC.ptrace(_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            code = 0
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    _LIBC.ptrace(_SETOPTIONS, child, None, _EXITKILL)
    stops = 0
    while True:
        if stops == stop:
            os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            return None
        _LIBC.ptrace(_SYSCALL, child, None, None)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the work failed"
            return stops
        assert os.WIFSTOPPED(status), status
        stops += 1
