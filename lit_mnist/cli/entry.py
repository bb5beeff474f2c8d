"""The command line as a program of its own: a quick start and a quick exit.

A program imports this module first. It imports neither torch nor Lightning.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib.util import find_spec
from threading import Event
from typing import NoReturn

from lit_mnist.cli.torch_internals import defer_compiler
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import print_error

# A collection visits all the objects of a library that is being imported, and finds no garbage among them.
_THRESHOLDS_OF_IMPORTS = 100_000, 20, 100
_THRESHOLDS = gc.get_threshold()
# What is imported before the versions of the libraries are checked. They are missing in a Python without lit_mnist.
_NEEDED = ("yaml", "packaging")
# Whether `freeze` was called. Python counts the objects to tell, which takes 60 ms.
_FROZEN = Event()
# Once it is frozen, this list is never destroyed, nor is what it holds.
_HELD: list[object] = []
_HELD.append(_HELD)


def prepare() -> None:
    """Prepares this process for the imports of the command line, which take seconds.

    A signal during them ends the process as it does later, and Ctrl-C without a traceback. The garbage collector is
    almost off until `finish_imports`, and torch's compiler is imported only where something is compiled.
    """
    defer_compiler()
    gc.set_threshold(*_THRESHOLDS_OF_IMPORTS)
    STOP.listen()
    # The handlers of other packages are registered later and thus called before.
    atexit.register(_leave)


def freeze() -> None:
    """Excludes the objects of all imported modules from the garbage collection."""
    gc.freeze()
    _FROZEN.set()


def finish_imports() -> bool:
    """Freezes the objects of all imported modules, and collects garbage as usual from now on.

    Otherwise, the exit of Python takes more than a second to find out that these objects refer to each other. In a
    program that did not call `prepare`, nothing changes.

    Returns:
        Whether this module has frozen the objects of this process.
    """
    if gc.get_threshold() == _THRESHOLDS_OF_IMPORTS:
        freeze()
        gc.set_threshold(*_THRESHOLDS)
    return _FROZEN.is_set()


def entry(engine: str = "lightning") -> NoReturn:
    """Runs the command line in a process of its own, and exits with its code."""
    prepare()
    for package in _NEEDED:
        if find_spec(package) is None:
            print_error(
                f"error: lit_mnist needs the package {package}, which {sys.executable} does not have. In a checkout, "
                "run: source .venv/bin/activate. Elsewhere, see docs/install.md."
            )
            sys.exit(2)
    from lit_mnist.cli.main import main

    sys.exit(main(engine=engine))


def _leave() -> None:
    """Destroys the objects of the run, which may print, and keeps the exit from reporting the frozen objects."""
    if not _FROZEN.is_set():
        return
    # Python clears the modules that still exist at its end, which closes the files that they have open. It would not
    # find a module that only its own functions refer to, because the collection skips frozen objects.
    _HELD.extend(sys.modules.values())
    gc.collect()
    if sys.stderr is not None:
        sys.stderr.flush()
    # nanobind, which Triton is written with, reports them as leaks.
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
