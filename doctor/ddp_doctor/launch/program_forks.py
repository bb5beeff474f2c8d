"""Runs the Python programs of a command in forks of a process that has imported torch, as new interpreters would.

An import of torch takes a second, and two or three processes of each run need it. The first run of an examination is
the user's command as it is. The later ones are run here; the first of them must give the weights of the user's command.

A new interpreter asks for a fork. It stays, with its process ID, until the program ends: it forwards signals, and ends
with the same exit code. Whatever is unusual, the program is run in the new interpreter.
"""

import atexit
import builtins
import fcntl
import importlib
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

from ddp_doctor.processes import die_with_parent
from ddp_doctor.records.spec import FOLDER

# The environment variable that names the socket of the process that has imported torch.
SOCKET = "DDP_DOCTOR_FORKS"
_SPAWNS = "from multiprocessing.spawn import spawn_main;"
# Variables that libraries may read when they are imported, and those of them that do not matter here.
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH", "LD_", "PYTHON", "OPENBLAS_")
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "PYTHONPATH", "PYTHONUNBUFFERED")


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


def _interpreter(environment: dict[str, str]) -> list[Any]:
    """Returns what must be equal in both interpreters."""
    names = [name for name in environment if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)]
    return [sys.prefix, {name: environment[name] for name in names}]


def run_elsewhere() -> None:
    """Runs this program in a fork of the other process, and ends; returns if that is not possible."""
    program = program_of(sys.orig_argv)
    if program is None:
        return
    files = [number for number in _open_files() if os.get_inheritable(number)]
    request = {
        "interpreter": _interpreter(dict(os.environ)),
        "program": program,
        "words": sys.orig_argv,
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "files": files,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        if answer := connection.recv(16):
            _follow(int(answer), connection, files)


def _open_files() -> list[int]:
    """Returns the numbers of the open files of this process."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    # The folder itself was one of them.
    return [number for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")]


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


def start(folder: Path) -> None:
    """Starts a fork of this process that runs programs; interpreters that this process starts find it."""
    own = _interpreter(dict(os.environ))
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
                    _serve(connection, own)
                    os._exit(0)
                connection.close()
        finally:
            os._exit(1)
    listener.close()


def _serve(connection: socket.socket, own: list[Any]) -> None:
    """Runs a program, and tells the process that waits for it how it has ended.

    That process runs the program itself if it gets no answer, since its interpreter differs from the own one.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 253)
    request = json.loads(message)
    if request["interpreter"] != own:
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
    for number in set(_open_files()) - set(numbers):
        os.close(number)


def _become(request: dict[str, Any]) -> None:
    """Takes the environment and folder of the other process, which forwards the signals to its group."""
    os.setsid()
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


def _run(kind: str, words: list[str]) -> None:
    """Runs a program to its end, which is the end of this process."""
    from ddp_doctor.launch.rank import observe

    code: Any = None
    try:
        # A new interpreter does so when it has imported torch.
        observe(Path(os.environ[FOLDER]))
        _execute(kind, words)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.last_value = error
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
        main.__file__ = str(path)
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)  # noqa: S102
