"""Runs the Python programs of a command in forks of this process, which has imported torch; see `proxy`.

An import of torch takes a second, and two or three processes of each run need it. The first runs of an examination are
the user's command as it is. The later ones are run here; the first of them must give the weights of the user's command.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

from ddp_doctor.launch.proxy import SOCKET
from ddp_doctor.processes import die_with_parent

# Variables that libraries may read when they are imported, and those of them that do not matter here.
_READ_AT_IMPORT = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "PYTORCH",
    "LD_",
    "PYTHON",
    "OPENBLAS_",
)
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "PYTHONPATH", "PYTHONUNBUFFERED")


def settings(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that must be those of this process."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)
    }


def start(folder: Path) -> None:
    """Starts a fork of this process that runs programs; interpreters that this process starts find it.

    Args:
        folder: Folder of the run.
    """
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        # A fork would lack the other threads.
        return
    known = settings(dict(os.environ))
    listener = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        listener.bind(str(folder / "forks"))
        listener.listen(64)
        os.environ[SOCKET] = str(folder / "forks")
        if os.fork() == 0:
            try:
                die_with_parent()
                _Programs(listener, known).serve()
            finally:
                os._exit(0)
    listener.close()


class _Programs:
    """The programs that run.

    Args:
        listener: The socket that new ones connect to.
        known: What `settings` returns of this process.
    """

    def __init__(self, listener: socket.socket, known: dict[str, str]) -> None:
        self._listener, self._known = listener, known
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        # By the handle of the process: its ID, and the connection to the one that waits for it.
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> None:
        """Runs programs until this process is killed."""
        while True:
            for handle, _ in self._poll.poll():
                if handle == self._listener.fileno():
                    self._accept(self._listener.accept()[0])
                elif handle in self._running:
                    self._end(handle)
                else:
                    self._kill(handle)

    def _accept(self, connection: socket.socket) -> None:
        pid = None
        with suppress(OSError, ValueError, struct.error):
            pid = self._begin(connection)
        if pid is None:
            # It is started as usual.
            connection.close()
            return
        handle = os.pidfd_open(pid)
        self._running[handle] = pid, connection
        self._poll.register(handle, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def _begin(self, connection: socket.socket) -> int | None:
        head, files, _, _ = socket.recv_fds(connection, 4, 253)
        try:
            (size,) = struct.unpack("=I", head)
            request = json.loads(connection.recv(size, socket.MSG_WAITALL))
            own = [sys.prefix, sys.version, bool(sys.dont_write_bytecode)]
            if request["python"] != own or settings(request["environment"]) != self._known:
                return None
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent()
                    _take_files(files, request["files"])
                    # It imports torch, which this process has done.
                    from ddp_doctor.launch.forked_program import run_program

                    run_program(request)
                finally:
                    os._exit(1)
            connection.sendall(f"{pid}\n".encode())
            return pid
        finally:
            for file in files:
                os.close(file)

    def _end(self, handle: int) -> None:
        """Tells the process that waits how the program has ended."""
        pid, connection = self._running.pop(handle)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        self._poll.unregister(handle)
        with suppress(KeyError):
            self._poll.unregister(connection)
        os.close(handle)
        connection.close()

    def _kill(self, connection: int) -> None:
        """Kills a program whose waiting process was killed."""
        self._poll.unregister(connection)
        for pid, own in self._running.values():
            if own.fileno() == connection:
                os.kill(pid, signal.SIGKILL)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Gives files their numbers, and closes all others."""
    highest = max(numbers)
    for source, number in zip([fcntl.fcntl(file, fcntl.F_DUPFD, highest + 1) for file in files], numbers, strict=True):
        os.dup2(source, number)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in numbers:
            with suppress(OSError):
                os.close(int(entry.name))
