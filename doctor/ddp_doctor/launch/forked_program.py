"""Runs a Python program in this process, a fork, as a new interpreter would."""

from __future__ import annotations

import atexit
import builtins
import copy
import importlib
import importlib.abc
import importlib.machinery
import io
import multiprocessing.process
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.launch.command_rank import start
from ddp_doctor.records.spec import FOLDER


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
        start(Path(os.environ[FOLDER]))


def run_program(request: dict[str, Any]) -> None:
    """Runs a program to its end, which is the end of this process.

    Args:
        request: What `proxy` tells of the process in whose place this one is.
    """
    _become(request)
    _open_streams(unbuffered=request["unbuffered"])
    code = _code_of(request)
    # As Python does at its end, but without destroying all objects.
    getattr(threading, "_shutdown")()  # noqa: B009
    getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _become(request: dict[str, Any]) -> None:
    """Takes the session, environment, folder and signals of the other process."""
    if request["leads_session"]:
        os.setsid()
    else:
        # The other process forwards the signals to its group.
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["mask"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.orig_argv[:] = request["words"]
    sys.executable = request["executable"]
    sys.path[:] = request["path"]
    # What these modules have found out when they were imported.
    tempfile.tempdir = None
    setattr(multiprocessing.process, "ORIGINAL_DIR", request["folder"])  # noqa: B010
    random.seed()
    importlib.invalidate_caches()


def _open_streams(*, unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw: Any = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if number == 2 else None
        by_line = number == 2 or raw.isatty()
        stream = io.TextIOWrapper(raw, errors=errors, line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _code_of(request: dict[str, Any]) -> int:
    """Runs the program, and returns its exit code; a negative one is a signal."""
    try:
        sys.meta_path.insert(0, _HiddenTorch())
        _execute(*request["program"])
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


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
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        # As Python makes it: not normalized.
        path = os.path.join(str(Path.cwd()), words[0].removeprefix("./"))  # noqa: PTH118
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)  # noqa: S102
