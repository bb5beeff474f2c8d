"""`lit-mnist new FOLDER`: writes a small complete project for the user. Nothing here imports torch.

The project is the folder `template` of the package, whose package has the name `my_project`.
"""

from __future__ import annotations

import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from lit_mnist.distributed.terminal import print_labelled
from lit_mnist.errors import InputError, nearest
from lit_mnist.run.help_text import HELP_FLAGS, help_topic, paragraph

TEMPLATE = Path(__file__).parents[1] / "template"
PLACEHOLDER = "my_project"
_ABOUT = (
    "Writes a small complete project into a new or an empty folder: a LightningModule and its data, a script, a "
    "configuration, a test that one rank and two train the same, and a workflow for CI. The last part of FOLDER is the "
    "name of the Python package."
)
_EXIT_CODES = "exit codes: 0 written; 2 the name or the folder is rejected, and nothing is written"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names that the project uses for other things.
_USED = frozenset({"train", "tests", "test_ranks", "test_doctor", "config"})


def help_of_new(words: Sequence[str], program: str) -> str:
    """Returns the help if the words ask for it, otherwise nothing."""
    if help_topic(words) is None:
        return ""
    return f"usage: {program} new FOLDER\n\n{paragraph(_ABOUT)}\n\n{paragraph(_EXIT_CODES)}"


def run_new(words: Sequence[str]) -> int:
    """Writes a project, and returns the exit code 0.

    Raises:
        InputError: The words, the name or the folder are rejected, or it cannot be written. Nothing is written then.
    """
    flags = [word for word in words if word.startswith("-")]
    if flags:
        raise InputError(f"Unknown flag {flags[0]}{nearest(flags[0], HELP_FLAGS) or '. See: lit-mnist new --help'}")
    if len(words) != 1 or not words[0]:
        raise InputError("The command new needs one folder, such as: lit-mnist new my_project")
    folder = Path(words[0])
    name = _package_name(folder)
    _check_empty(folder)
    try:
        _write(folder, contents_of(name))
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}.") from error
    print_labelled("written", f"{folder}: its README.md explains the files")
    if folder.resolve() != Path.cwd():
        print_labelled("enter", f"cd {shlex.quote(str(folder))}")
    print_labelled("train", f"lit-mnist --config config.yaml --import {name} --devices 2")
    return 0


def _package_name(folder: Path) -> str:
    """Returns the name of the package in a folder.

    Raises:
        InputError: It is not the name of a package, or another package or file of the project has it.
    """
    # Unlike `resolve`, this keeps the name of a link.
    name = Path(os.path.abspath(folder)).name  # noqa: PTH100
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        valid = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower()
        hint = f", such as {valid}" if _NAME.fullmatch(valid) and not keyword.iskeyword(valid) else ""
        why = "it is a keyword" if keyword.iskeyword(name) else "use letters, digits and underscores, first a letter"
        raise InputError(f"{name!r} is not the name of a Python package: {why}{hint}.")
    if name in _USED:
        raise InputError(f"The name {name} is used by another part of the project: choose another one.")
    if name in sys.stdlib_module_names or _is_installed(name):
        raise InputError(f"There is a Python module {name} already, which the project would hide: choose another name.")
    return name


def _is_installed(name: str) -> bool:
    places = [path for path in sys.path if path and Path(path).resolve() != Path.cwd()]
    found = PathFinder.find_spec(name, places)
    # A folder without code is found as well, and has no loader of its own.
    return found is not None and found.origin is not None


def _check_empty(folder: Path) -> None:
    """Rejects a folder that is not empty, or that is a file."""
    try:
        if folder.is_symlink() and not folder.exists():
            raise InputError(f"{folder} is a link to nothing.")
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: choose another name.")
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{folder} exists and is not empty: choose another name, or move it away.")
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror or error}.") from error


def contents_of(name: str) -> dict[Path, str]:
    """Returns the text of each file of the project, with the name of its package."""
    paths = [path for path in TEMPLATE.rglob("*") if path.is_file() and not _is_left_over(path.relative_to(TEMPLATE))]
    return {
        Path(str(path.relative_to(TEMPLATE)).replace(PLACEHOLDER, name)): path.read_text().replace(PLACEHOLDER, name)
        for path in sorted(paths)
    }


def _is_left_over(path: Path) -> bool:
    """Returns whether a file was left by someone who ran the template where it is."""
    return "__pycache__" in path.parts or path.parts[0] in {"runs", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


def _write(folder: Path, contents: dict[Path, str]) -> None:
    """Writes the files into a new or an empty folder, and removes what it has created if that fails."""
    created = []
    missing = folder
    while not missing.exists():
        created.append(missing)
        missing = missing.parent
    try:
        for path, text in contents.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    except BaseException:
        if created:
            shutil.rmtree(created[-1], ignore_errors=True)
        else:
            for path in contents:
                part = folder / path.parts[0]
                shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
        raise
