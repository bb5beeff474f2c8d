"""A process that makes a private view for the ranks of a run, and keeps it until the next one."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.files.private_view import PrivateView, separate
from ddp_doctor.processes import die_with_parent

_NAMESPACES = ("user", "mnt")


class ViewProcess:
    """Makes private views, one at a time."""

    def __init__(self) -> None:
        self._handles: list[int] = []

    def make(self, folder: Path, layers: Path) -> dict[str, Any]:
        """Makes a view; the one before ends with its processes.

        Args:
            folder: Folder of the examination.
            layers: Empty folder in it, for what is written.

        Returns:
            `namespaces` and `layers` (paths by which processes of this user find them), `read_only`, `places` and
            `in_memory` (see `PrivateView`), and `single` (whether files of other owners cannot be written); or `error`.
        """
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()
        answer, told = os.pipe()
        wait, proceed = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(proceed)
                os.close(answer)
                _make(folder, layers, told, wait)
            finally:
                os._exit(0)
        os.close(told)
        os.close(wait)
        with os.fdopen(answer) as answers:
            try:
                return self._finish(pid, answers, proceed, layers)
            except OSError as error:
                return {"error": str(error)}
            finally:
                os.close(proceed)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _finish(self, pid: int, answers: Any, proceed: int, layers: Path) -> dict[str, Any]:
        single = False
        found: dict[str, Any] = json.loads(answers.readline() or '{"error": "the process was lost"}')
        if "error" in found:
            return found
        if found["users"] and not map_users(pid):
            single = True
            if other := foreign_file(Path.cwd()):
                return {"error": f"{other} belongs to another user or group"}
        os.write(proceed, b"\n")
        made: dict[str, Any] = json.loads(answers.readline() or '{"error": "the process was lost"}')
        if "error" in made:
            return made
        names = _NAMESPACES if found["users"] else _NAMESPACES[1:]
        paths = [f"/proc/{pid}/ns/{name}" for name in names]
        paths.append(f"/proc/{pid}/root{layers}" if made["in_memory"] else str(layers))
        # They keep the view, although this process of it ends.
        self._handles = [os.open(path, os.O_RDONLY) for path in paths]
        *namespaces, shown = (f"/proc/{os.getpid()}/fd/{handle}" for handle in self._handles)
        return {**made, "namespaces": namespaces, "layers": shown, "single": single}


def _make(folder: Path, layers: Path, told: int, wait: int) -> None:
    die_with_parent()

    def tell(**values: Any) -> None:
        os.write(told, (json.dumps(values) + "\n").encode())

    try:
        foreign = foreign_folders()
        users = separate()
        tell(users=users)
        os.read(wait, 1)
        view = PrivateView(folder, layers, in_user_namespace=users, foreign=foreign)
        view.make()
    except OSError as error:
        tell(error=str(error))
        return
    tell(read_only=view.read_only, places=view.places, in_memory=view.in_memory)
    os.read(wait, 1)


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
