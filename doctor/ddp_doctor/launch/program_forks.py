"""Runs the Python programs of a command in forks of this process, which has imported torch, as new interpreters would.

An import of torch takes a second, and two or three processes of each run need it. The first run of an examination is
the user's command as it is. The later ones are run here; the first of them must give the weights of the user's command.
A new interpreter asks for a fork in `proxy`.
"""

from __future__ import annotations

import atexit
import builtins
import copy
import fcntl
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.launch.proxy import SOCKET, python
from ddp_doctor.launch.rank import observe
from ddp_doctor.processes import die_with_parent
from ddp_doctor.records.spec import FOLDER

# Variables that libraries may read when they are imported, and those of them that do not matter here.
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH", "LD_", "PYTHON", "OPENBLAS_")
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
    known = settings(dict(os.environ))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "forks"))
    listener.listen(64)
    os.environ[SOCKET] = str(folder / "forks")
    if os.fork() == 0:
        try:
            die_with_parent()
            # Nobody waits for the forks.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    die_with_parent()
                    _serve(connection, known)
                    os._exit(0)
                connection.close()
        finally:
            os._exit(1)
    listener.close()


def _serve(connection: socket.socket, known: dict[str, str]) -> None:
    """Runs a program, and tells the process that waits for it how it has ended.

    Args:
        connection: Leads to that process, which starts the program as usual if it gets no answer.
        known: What `settings` returned when this process was started.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 253)
    request = json.loads(message)
    if request["python"] != python() or settings(request["environment"]) != known:
        return
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        _take_files(files, request["files"])
        _become(request)
        _run(*request["program"])
    for file in files:
        os.close(file)
    connection.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection.fileno()], [], [])[0]:
        # The process that waits was killed.
        os.kill(pid, signal.SIGKILL)
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Gives files their numbers, and closes all others."""
    highest = max(numbers)
    for source, number in zip([fcntl.fcntl(file, fcntl.F_DUPFD, highest + 1) for file in files], numbers, strict=True):
        os.dup2(source, number)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in numbers:
            with suppress(OSError):
                os.close(int(entry.name))


def _become(request: dict[str, Any]) -> None:
    """Takes the session, environment and folder of the other process."""
    if request["leads_session"]:
        os.setsid()
    else:
        # The other process forwards the signals to its group.
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.orig_argv[:] = request["words"]
    sys.path[:] = request["path"]
    # The other streams have no buffers: see `Interpreter`.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    # What this module has found out when it was imported.
    tempfile.tempdir = None
    random.seed()
    importlib.invalidate_caches()


class _HiddenTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hides torch, and gives it back with the probes when the program imports it, as a new interpreter has it then."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._hidden = {name: sys.modules.pop(name) for name in names}
        self._spec = self._hidden["torch"].__spec__

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Finds torch."""
        if fullname != "torch":
            return None
        found = copy.copy(self._spec)
        assert found is not None
        found.loader = self
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Returns torch."""
        return self._hidden["torch"]

    def exec_module(self, module: types.ModuleType) -> None:
        """Shows torch, and installs the probes."""
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._hidden)
        observe(Path(os.environ[FOLDER]))


def _run(kind: str, words: list[str]) -> None:
    """Runs a program to its end, which is the end of this process."""
    code: Any = None
    sys.meta_path.insert(0, _HiddenTorch())
    try:
        _execute(kind, words)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    # As Python does at its end, but without destroying all objects.
    getattr(threading, "_shutdown")()  # noqa: B009
    getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    os._exit((code or 0) & 0xFF)


def _execute(kind: str, words: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if kind == "module":
        sys.argv = ["-m", *words[1:]]
        sys.path.insert(0, str(Path.cwd()))
        getattr(runpy, "_run_module_as_main")(words[0])  # noqa: B009
    elif kind == "code":
        sys.argv = ["-c", *words[1:]]
        sys.path.insert(0, "")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv = list(words)
        path = Path.cwd() / words[0]
        sys.path.insert(0, str(path.resolve().parent))
        loader = importlib.machinery.SourceFileLoader("__main__", str(path))
        main.__dict__.update(__file__=str(path), __cached__=None, __loader__=loader)
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)  # noqa: S102
