"""Lets a process that has imported torch run a Python program of a command, in place of a new interpreter.

This process stays, with its process ID, until the program ends: it forwards signals, and ends with the same exit code.
Whatever is unusual, the program is run here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# The environment variable that names the socket of the process that has imported torch.
SOCKET = "DDP_DOCTOR_FORKS"
_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGWINCH")
# The kernel passes at most 253 at once.
_MOST_FILES = 200
_SPAWNS = "from multiprocessing.spawn import spawn_main;"
_UNUSUAL = (
    "debug",
    "inspect",
    "interactive",
    "optimize",
    "no_user_site",
    "no_site",
    "ignore_environment",
    "verbose",
    "bytes_warning",
    "isolated",
    "dev_mode",
    "utf8_mode",
    "safe_path",
)


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
    if program is None or any(getattr(sys.flags, name) for name in _UNUSUAL) or sys.warnoptions or sys._xoptions:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        files = _inherited()
        if files is None:
            return
        request = json.dumps(_describe(program, files)).encode()
        socket.send_fds(connection, [struct.pack("=I", len(request))], files)
        connection.sendall(request)
        answers = connection.makefile("rb")
        if line := answers.readline():
            _follow(int(line), answers, files)


def _describe(program: tuple[str, list[str]], files: list[int]) -> dict[str, Any]:
    mask = os.umask(0o077)
    os.umask(mask)
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    return {
        "python": [sys.prefix, sys.version, bool(sys.dont_write_bytecode)],
        "program": program,
        "words": sys.orig_argv,
        "executable": sys.executable,
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "mask": mask,
        "files": files,
        "ignored": ignored,
        "leads_session": os.getsid(0) == os.getpid(),
        "unbuffered": bool(getattr(sys.stdout, "write_through", False)),
    }


def _inherited() -> list[int] | None:
    """Returns the open files that this process was given; None if they are too many, or a standard one is closed."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The folder itself is closed again.
        with suppress(OSError):
            if os.get_inheritable(int(entry.name)):
                found.append(int(entry.name))
    return sorted(found) if len(found) <= _MOST_FILES and {0, 1, 2} <= set(found) else None


def _follow(pid: int, answers: Any, files: list[int]) -> None:
    """Forwards signals to the other process, and ends as it does."""

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for name in _FORWARDED:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    # The other end of a pipe sees its end as soon as the program closes it.
    for file in files:
        os.close(file)
    line = answers.readline()
    # The process that forks programs was lost, which ends all of them.
    code = int(line) if line else -signal.SIGKILL
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
