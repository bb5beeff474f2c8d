"""Lets a process that has imported torch run a Python program of a command, in place of a new interpreter.

This process stays, with its process ID, until the program ends: it forwards signals, and ends with the same exit code.
Whatever is unusual, the program is run here. The other process is in `program_forks`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# The environment variable that names the socket of the process that has imported torch.
SOCKET = "DDP_DOCTOR_FORKS"
_SPAWNS = "from multiprocessing.spawn import spawn_main;"


def python() -> list[Any]:
    """Returns what must be equal in both processes."""
    return [sys.prefix, sys.version, bool(sys.dont_write_bytecode)]


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns what a Python runs (`script`, `module` or `code`), and the words from there on; None if that is unusual.

    Args:
        words: `sys.orig_argv`.
    """
    rest = words[1:]
    while rest and rest[0] in {"-u", "-B"}:
        rest = rest[1:]
    if len(rest) > 1 and rest[0] == "-m":
        return "module", rest[1:]
    if len(rest) > 1 and rest[0] == "-c" and rest[1].startswith(_SPAWNS) and "--multiprocessing-fork" in rest:
        return "code", rest[1:]
    if rest and not rest[0].startswith("-") and Path(rest[0]).is_file():
        return "script", rest
    return None


def run_elsewhere() -> None:
    """Runs this program in a fork of the other process, and ends; returns if that is not possible."""
    program = program_of(sys.orig_argv)
    if program is None:
        return
    files = _inherited()
    request = {
        "python": python(),
        "program": program,
        "words": sys.orig_argv,
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "files": files,
        "leads_session": os.getsid(0) == os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        if answer := connection.recv(16):
            _follow(int(answer), connection, files)


def _inherited() -> list[int]:
    """Returns the open files that this process was given."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The folder itself is closed again.
        with suppress(OSError):
            if os.get_inheritable(int(entry.name)):
                found.append(int(entry.name))
    return found


def _follow(pid: int, connection: socket.socket, files: list[int]) -> None:
    """Forwards signals to the other process, and ends as it does."""

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    # The other end of a pipe sees its end as soon as the program closes it.
    for file in files:
        os.close(file)
    # Without an answer, the process that forks programs was lost, which ends all of them.
    code = int(connection.recv(16) or -signal.SIGKILL)
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
