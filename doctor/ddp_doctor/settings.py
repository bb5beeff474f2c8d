"""The section `[tool.ddp-doctor]` of `pyproject.toml`: flags that come before those of the command line.

Imports no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError, nearest

_SECTION = "ddp-doctor"
# Flags that say what is done now.
_NOT_SETTINGS = {"--args", "--explain", "--help", "--write-baseline"}
# Files are relative to pyproject.toml.
_FILES = {"config", "json", "html", "output", "baseline"}


def read_settings(flags: Collection[str], folder: Path | None = None) -> tuple[str, list[str]]:
    """Returns the nearest `pyproject.toml` that has the section, and its keys as words of a command line.

    Args:
        flags: The flags of the command, such as `--devices`.
        folder: Where the search begins, towards the root of the file system; by default the current folder.

    Raises:
        InputError: The file is no TOML, or the section has an unknown key.
    """
    begin = (folder or Path.cwd()).absolute()
    for path in (place / "pyproject.toml" for place in (begin, *begin.parents)):
        if path.is_file():
            try:
                section = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get(_SECTION)
            except (OSError, ValueError) as error:
                raise InputError(f"{path} cannot be read: {error}.") from error
            if section is not None:
                where = f"[tool.{_SECTION}] of {path}"
                return where, [word for key, value in section.items() for word in _words(flags, where, key, value)]
    return "", []


def _words(flags: Collection[str], where: str, key: str, value: Any) -> list[str]:
    known = [flag.removeprefix("--") for flag in flags if flag not in _NOT_SETTINGS and not flag.startswith("--no-")]
    if key not in known:
        hint = nearest(key, known) or f": the keys are {', '.join(known)}."
        raise InputError(f"{where} has no key {key}{hint}")
    if isinstance(value, bool):
        no = f"--no-{key}"
        return [f"--{key}"] if value else [no] if no in flags else []
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if key in _FILES:
        text = str(Path(where.partition(" of ")[2]).parent / text)
    return [f"--{key}={text}"]
