"""`--import PACKAGE`: the packages whose classes a configuration may name. Nothing here imports torch by itself."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from lit_mnist.errors import InputError, nearest

FLAG = "--import"
Argument = TypeVar("Argument")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def split_imports(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Returns the packages that a command line names, and the words without them.

    Raises:
        InputError: `--import` has no value, or a value that is not the name of a package.
    """
    names: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag != FLAG:
            others.append(word)
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        if not value:
            raise InputError(f"{FLAG} needs a value: the name of a package or module.")
        names += value.split(",")
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{FLAG} {name!r} is not the name of a package or module, such as my_package.")
    return tuple(dict.fromkeys(names)), others


def check_packages(names: Sequence[str]) -> None:
    """Rejects a package that does not exist, without an import.

    Raises:
        InputError: There is no such package.
    """
    _use_current_folder(names)
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise InputError(_missing(name))


def import_packages(names: Sequence[str]) -> None:
    """Imports the user's packages, which may be in the current folder.

    Raises:
        InputError: A package does not exist, or its import fails; its own error is the cause.
    """
    _use_current_folder(names)
    for name in names:
        try:
            _check_is_a_package(name, importlib.import_module(name))
        except InputError:
            raise
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise InputError(_missing(name)) from error
            raise InputError(f"{FLAG} {name}: its import needs {error.name}, which is not installed.") from error
        except Exception as error:
            raise InputError(_failed_import(name, error)) from error


def _check_is_a_package(name: str, module: ModuleType) -> None:
    """Rejects a folder that only contains the package of its name, which Python imports as an empty package."""
    if getattr(module, "__file__", None) is None and (Path(name) / name / "__init__.py").is_file():
        raise InputError(f"{FLAG} {name}: the package is in the folder {name}. Run the command from that folder.")


def import_and_run(names: Sequence[str], work: Callable[[Argument], None], argument: Argument) -> None:
    """Calls `work` after importing the user's packages, which a new process has not imported."""
    import_packages(names)
    work(argument)


def _use_current_folder(names: Sequence[str]) -> None:
    if names and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))


def _missing(name: str) -> str:
    """Returns the message about a package that does not exist, with the most similar one in the current folder."""
    here = [path.stem for path in Path().glob("*.py")] + [path.parent.name for path in Path().glob("*/__init__.py")]
    hint = nearest(name, here) or ". Run the command from the folder that contains it, or install it."
    return f"{FLAG} {name}: there is no such package{hint}"


def _failed_import(name: str, error: Exception) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})" if trace else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})"
    return f"{FLAG} {name}: its import fails: {type(error).__name__}: {error}{place}."
