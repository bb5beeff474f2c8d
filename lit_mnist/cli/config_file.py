"""Looks into a configuration file before it is parsed: a small text of plain values, and nothing that grows or hangs.

The parser reads whatever a path leads to, follows paths to further files, recurses without a bound, and repeats what an
alias stands for: a hundred bytes can become gigabytes.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

from lit_mnist.errors import InputError

_LARGEST = 100_000
_MOST_VALUES = 10_000
_DEEPEST = 30
# Python takes no longer number, and no setting is a longer text.
_LONGEST_VALUE = 3_000


def read_config_file(path: Path) -> Any:
    """Returns what a configuration file holds.

    Args:
        path: The file.

    Raises:
        InputError: It is no regular file, too large, too deep, or not YAML.
    """
    try:
        if not path.exists():
            raise InputError(f"The configuration {path} cannot be read: there is no such file.")
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"The configuration {path} cannot be read: it is not a file.")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The configuration {path} cannot be read: {error}.") from error
    if len(content) > _LARGEST:
        raise InputError(f"The configuration {path} is larger than {_LARGEST} bytes: it is not one of this project.")
    try:
        _check_size(text, path)
        values = yaml.safe_load(text)
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"The configuration {path} is not YAML: {' '.join(str(error).split())[:300]}.") from error
    return values


def _check_size(text: str, path: Path) -> None:
    """Refuses YAML that would become much more than its text, before anything is made of it."""
    left, sizes = _MOST_VALUES, dict[str | None, int]()
    # The open collections: their anchors, and how many values were left when each began.
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor would have no end.
            left -= sizes.get(event.anchor, _MOST_VALUES + 1)
        elif isinstance(event, yaml.ScalarEvent):
            left -= 1
            if event.anchor:
                sizes[event.anchor] = 1
            if len(event.value) > _LONGEST_VALUE:
                raise InputError(f"The configuration {path} holds a value of {len(event.value)} characters.")
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, left))
            left -= 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = before - left
        if left < 0 or len(opened) > _DEEPEST:
            raise InputError(f"The configuration {path} holds too many values, or nests them too deeply.")


def names_file(folder: Path, name: str) -> bool:
    """Returns whether a text names something that is there, from a folder or from the working folder."""
    try:
        return bool(name) and "\0" not in name and ((folder / name).exists() or Path(name).exists())
    except OSError:
        return False
