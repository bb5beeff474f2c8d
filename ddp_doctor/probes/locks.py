"""Sees the lock files of this process: files that it has locked or created exclusively, and has open."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.files.active_layer import meant


class Locks:
    """Follows the audit events of locks.

    Args:
        on_lock: Called with the path of each file that is locked or created exclusively.
    """

    def __init__(self, on_lock: Callable[[str], object]) -> None:
        self._on_lock = on_lock
        self._paths: set[str] = set()

    def see(self, event: str, args: Any) -> None:
        """Takes an audit event of Python."""
        if event in {"fcntl.flock", "fcntl.lockf"}:
            path = _path_of(args[0])
            if args[1] & fcntl.LOCK_UN:
                self._paths.discard(path)
            elif path:
                self._add(path)
        elif event == "open" and isinstance(args[0], str) and isinstance(args[2], int) and args[2] & os.O_EXCL:
            self._add(meant(os.path.abspath(args[0])))  # noqa: PTH100

    def held(self) -> list[str]:
        """Returns the locks that this process holds: their files are still open."""
        if not self._paths:
            return []
        return sorted(self._paths & {_path_of(int(number)) for number in os.listdir("/proc/self/fd")})  # noqa: PTH208

    def _add(self, path: str) -> None:
        self._paths.add(path)
        self._on_lock(path)


def _path_of(descriptor: int) -> str:
    with suppress(OSError):
        return meant(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return ""
