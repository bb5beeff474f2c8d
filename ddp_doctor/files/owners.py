"""Files of other users and groups, which an unprivileged private view cannot copy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOST_ENTRIES = 20_000


def map_users(pid: int) -> bool:
    """Gives the users and groups in the namespace of a process the numbers that they have here.

    Returns:
        Whether all are known there. Without the rights of root, a process may map itself alone.
    """
    process = Path(f"/proc/{pid}")
    for kind in ("uid", "gid"):
        known = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
        try:
            (process / f"{kind}_map").write_text("".join(f"{inner} {inner} {count}\n" for inner, _, count in known))
        except PermissionError:
            if kind == "uid":
                (process / "uid_map").write_text(f"{os.geteuid()} {os.geteuid()} 1\n")
            (process / "setgroups").write_text("deny")
            (process / "gid_map").write_text(f"{os.getegid()} {os.getegid()} 1\n")
            return False
    return True


def foreign_folders() -> list[str]:
    """Returns the folders of others on the way to the current folder and to those that the environment names.

    Those around them are in the list as well, outer ones first.
    """
    values = [str(Path.cwd()), tempfile.gettempdir()]
    values += [part for value in os.environ.values() for part in value.split(os.pathsep)]
    found: dict[str, None] = {}
    for value in values:
        # A text that is no path, or one that this user may not see.
        with suppress(OSError, ValueError):
            if not value.startswith("/") or not Path(value).is_dir():
                continue
            place = Path(value).resolve()
            way = [place, *place.parents]
            while way and not _is_foreign(way[0]):
                way.pop(0)
            found |= {str(folder): None for folder in reversed(way)}
    return list(found)


def foreign_file(folder: Path) -> str:
    """Returns an entry of a folder that belongs to others, although this user may write it; empty if there is none."""
    for number, path in enumerate(_entries(folder)):
        if number > _MOST_ENTRIES:
            break
        if path.exists() and _is_foreign(path) and not path.is_symlink() and os.access(path, os.W_OK):
            return str(path)
    return ""


def _entries(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _is_foreign(path: Path) -> bool:
    found = path.lstat()
    return (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid())
