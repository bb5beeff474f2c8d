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

_MOST_ENTRIES = 20_000


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
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                os.write(told, f"{json.dumps(_made(folder, layers))}\n".encode())
                signal.pause()
            finally:
                os._exit(0)
        os.close(told)
        try:
            with os.fdopen(answer) as answers:
                made: dict[str, Any] = json.loads(answers.readline() or '{"error": "the process was lost"}')
            return made if "error" in made else {**made, **self._take(pid, made, layers)}
        except OSError as error:
            return {"error": str(error)}
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _take(self, pid: int, made: dict[str, Any], layers: Path) -> dict[str, Any]:
        """Keeps the view of a process, although the process ends."""
        paths = [f"/proc/{pid}/ns/{name}" for name in (("user", "mnt") if made["single"] else ("mnt",))]
        paths.append(f"/proc/{pid}/root{layers}" if made["in_memory"] else str(layers))
        self._handles = [os.open(path, os.O_RDONLY) for path in paths]
        *namespaces, shown = (f"/proc/{os.getpid()}/fd/{handle}" for handle in self._handles)
        return {"namespaces": namespaces, "layers": shown}


def _made(folder: Path, layers: Path) -> dict[str, Any]:
    """Makes a view in this process, and describes it."""
    try:
        single = separate()
        if single and (other := foreign_file(Path.cwd())):
            return {"error": f"{other} belongs to another user or group"}
        view = PrivateView(folder, layers, in_user_namespace=single, foreign=foreign_folders() if single else ())
        view.make()
    except OSError as error:
        return {"error": str(error)}
    return {"read_only": view.read_only, "places": view.places, "in_memory": view.in_memory, "single": single}


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
