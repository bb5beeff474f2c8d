"""Runs the Python programs of a test in forks of this process, which has imported torch and Lightning already.

A test whose program may be any process asks for the fixture `forked_python`. Each `python` that it starts with
`subprocess` is a fork then, as is each one that the program starts: a rank of torchrun or of Lightning. That saves the
imports, which take up to eight seconds of a processor for each process. What is about the start of Python itself, about
its options, or about other interpreters, starts as usual.
"""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing.util
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
# What a program finds imported. The modules of tests and of other programs are not.
_KEPT = tuple(str(path) for path in (sys.prefix, sys.base_prefix, ROOT / "lit_mnist", ROOT / "ddp_doctor"))
_EXECV = os.execv
# torch has imported the class under this name.
_LAUNCHER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


class ForkedPopen(subprocess.Popen[Any]):
    """Starts a process, which is a fork of this one if the command is a Python program."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        program = None if rest or options.get("preexec_fn") or options.get("shell") else program_of(args)
        if program is not None:
            environment, files = options.get("env"), tuple(options.get("pass_fds", ()))
            # It is called in the new process with its folder and streams, and does not return.
            options["preexec_fn"] = lambda: _run(program, environment, files)
        super().__init__(args, *rest, **options)


def execv(path: str, args: Sequence[str]) -> NoReturn:
    """Becomes another program, as `os.execv` does."""
    program = program_of(args)
    if program is None:
        _EXECV(path, args)
    _run(program, None, ())


def program_of(args: Any) -> list[str] | None:
    """Returns the words of a Python program from its script, `-m` or `-c` on; None for another command."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fspath(word) for word in args]
    here = Path(sys.executable).parent
    path = Path(words[0] if "/" in words[0] else shutil.which(words[0]) or "/")
    if path.parent != here or not path.is_file():
        return None
    if not path.name.startswith("python"):
        # A command of the environment, such as torchrun.
        with path.open("rb") as file:
            interpreter = Path(os.fsdecode(file.readline().removeprefix(b"#!").strip()))
        return [str(path), *words[1:]] if interpreter.resolve() == Path(sys.executable).resolve() else None
    rest = words[1:]
    while rest and rest[0] == "-u":
        rest = rest[1:]
    if rest and rest[0] in {"-c", "-m"}:
        return rest if len(rest) > 1 else None
    return rest if rest and not rest[0].startswith("-") else None


def _run(words: Sequence[str], environment: Mapping[str, str] | None, files: Iterable[int]) -> NoReturn:
    code = 1
    try:
        _close_files(files)
        _mark(words)
        _become_new(environment)
        code = _code_of(list(words))
        # As Python does at its end.
        getattr(threading, "_shutdown")()  # noqa: B009
        getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _close_files(kept: Iterable[int]) -> None:
    """Closes what a new process does not inherit; `Popen` waits for that."""
    first = 3
    for file in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, file)
        first = file + 1


def _mark(words: Sequence[str]) -> None:
    """Keeps a file open that is named like each path of the command line, for `processes.named`."""
    for word in words:
        if word.startswith("/"):
            os.memfd_create(word)


def _become_new(environment: Mapping[str, str] | None) -> None:
    """Forgets what this process was."""
    gc.enable()
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # `Popen` has given the new process the defaults of these, which Python ignores.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = open(number, "w" if number else "r", 1 if number == 2 else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    logging.getLogger().handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    getattr(atexit, "_clear")()  # noqa: B009
    atexit.register(getattr(multiprocessing.util, "_exit_function"))  # noqa: B009
    tempfile.tempdir = None
    sys.dont_write_bytecode |= bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(_KEPT):
            del sys.modules[name]
    # pytest's, which finds packages that are plugins of it, and gives no code to `runpy`.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest.")]
    random.seed()
    np.random.seed()
    # The seed that torch begins with.
    torch.manual_seed(67280421310721)
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    os.execv = execv  # type: ignore[assignment]
    torch.multiprocessing.spawn = _spawn
    if launcher := sys.modules.get(_LAUNCHER):
        setattr(launcher, "Popen", ForkedPopen)  # noqa: B010


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, **_: Any) -> Any:
    """Starts ranks as `torch.multiprocessing.spawn` does, but as forks."""
    return torch.multiprocessing.start_processes(fn, args, nprocs, join, daemon, "fork")


def _code_of(words: list[str]) -> int:
    """Runs a program, and returns its exit code."""
    try:
        _execute(words)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _execute(words: list[str]) -> None:
    kind, name = words[0], words[-1] if len(words) == 1 else words[1]
    first = str(Path.cwd()) if kind == "-m" else "" if kind == "-c" else str(Path(kind).resolve().parent)
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.orig_argv[:] = [sys.executable, *words]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-m":
        sys.modules.pop(name, None)
        sys.argv = words[1:]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        sys.argv = ["-c", *words[2:]]
        source, path = name, "<string>"
    else:
        sys.argv = words
        source, path = Path(kind).read_text(), kind
        main.__dict__["__file__"] = path
    exec(compile(source, path, "exec"), main.__dict__)  # noqa: S102
