"""A copy-on-write view of all files, in which a run writes: overlays in a separate mount namespace.

A process of the doctor makes the view, and the ranks of the run enter it. It ends with its last process, so nothing
has to be undone if the doctor is killed.
"""

import itertools
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ddp_doctor.files import kernel
from ddp_doctor.processes import die_with_parent

# File systems of the kernel and devices, which are no files of the user.
_SHOWN = {"/dev", "/proc", "/sys"}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
# A larger file beside a mount is shown read-only, and not copied.
_MOST_BYTES = 16 << 20
# The namespaces of the view that this process keeps.
_namespaces: list[int] = []


def make(folder: Path, layers: Path) -> dict[str, Any]:
    """Makes a view; the one before ends with its processes.

    Args:
        folder: Folder of the examination, which stays as it is for all.
        layers: Empty folder in it, for what is written.

    Returns:
        `namespaces` (paths by which processes of this user find them), `read_only` (folders that this user may write,
        but the run may not), and `single` (whether files of other owners cannot be written); or `error`.
    """
    while _namespaces:
        os.close(_namespaces.pop())
    answer, told = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            told.send(_made(folder, layers))
            signal.pause()
        finally:
            os._exit(0)
    told.close()
    try:
        made: dict[str, Any] = answer.recv()
        if "error" not in made:
            kinds = ("user", "mnt") if made["single"] else ("mnt",)
            _namespaces.extend(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds)
            made["namespaces"] = [f"/proc/{os.getpid()}/fd/{handle}" for handle in _namespaces]
        return made
    except (OSError, EOFError) as error:
        return {"error": str(error) or "the process was lost"}
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def enter(namespaces: Sequence[str], cwd: str) -> None:
    """Moves this process, which must have one thread, into a view."""
    kernel.enter(namespaces)
    os.chdir(cwd)
    if os.geteuid():
        kernel.drop_capabilities()
    die_with_parent()


def _made(folder: Path, layers: Path) -> dict[str, Any]:
    """Makes a view in this process, and describes it."""
    try:
        single = _separate()
        own = Path.cwd().stat()
        if single and (own.st_uid, own.st_gid) != (os.geteuid(), os.getegid()):
            return {"error": "the current folder belongs to another user or group"}
        view = _View(folder, layers, in_user_namespace=single)
        view.make()
    except OSError as error:
        return {"error": str(error)}
    return {"read_only": view.read_only, "single": single}


def _separate() -> bool:
    """Moves this process to a new mount namespace; returns whether it needs a user namespace, with its user alone."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        with suppress(OSError):
            kernel.unshare(kernel.NEW_MOUNTS)
            return False
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_USERS)
    known = (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"))
    for name, text in known:
        Path("/proc/self", name).write_text(text)
    return True


def _needed_folders() -> list[Path]:
    """Returns the current folder and those that the environment names, with those around them, outer ones first."""
    values = [str(Path.cwd()), tempfile.gettempdir()]
    values += [part for value in os.environ.values() for part in value.split(os.pathsep)]
    found: set[Path] = set()
    for value in values:
        # A text that is no path, or one that this user may not see.
        with suppress(OSError, ValueError):
            if value.startswith("/") and Path(value).is_dir():
                place = Path(value).resolve()
                found |= {place, *place.parents}
    return sorted(found)


def _mounts() -> set[str]:
    """Returns the mount points."""
    places = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return {re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place) for place in places}


class _View:
    """The view of this process, whose mount namespace must be its own."""

    def __init__(self, folder: Path, layers: Path, *, in_user_namespace: bool) -> None:
        self.folder, self.layers = str(folder), layers
        self.read_only: list[str] = []
        self._root = str(layers / "root")
        # redirect_dir lets folders be renamed; it needs the rights of root.
        self._options = "userxattr" if in_user_namespace else "redirect_dir=on"
        # A user namespace has no right to copy the folders of others into a layer.
        self._needed = _needed_folders() if in_user_namespace else []
        self._mounts = _mounts()
        self._numbers = itertools.count()

    def make(self) -> None:
        """Makes the view the root of this process.

        Raises:
            OSError: The kernel does not permit it.
        """
        kernel.mount("", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
        Path(self._root).mkdir()
        try:
            self._overlay(self._root, self._root)
            kernel.unmount(self._root)
        except OSError:
            # The file system of the temporary folder is none that can hold overlays.
            kernel.mount("none", str(self.layers), "tmpfs", options="mode=700")
            Path(self._root).mkdir()
        self._build("/")
        kernel.bind(self.folder, self._at(self.folder))
        kernel.mount("none", self._at(str(self.layers)), "tmpfs", options="mode=700")
        kernel.change_root(self._root)

    def _at(self, path: str) -> str:
        return f"{self._root}{path}".rstrip("/")

    def _overlay(self, lower: str, target: str) -> None:
        layer = self.layers / str(next(self._numbers))
        upper, work = layer / "files", layer / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        _copy_facts(Path(lower), upper)
        below = self._below(lower)
        for folder in self._needed:
            if Path(lower) in folder.parents and not any(folder.is_relative_to(place) for place in below):
                made = upper / folder.relative_to(lower)
                made.mkdir()
                _copy_facts(folder, made)
        # Paths may have characters that separate the options.
        handles = [os.open(path, os.O_PATH) for path in (lower, upper, work)]
        names = ("lowerdir", "upperdir", "workdir")
        options = ",".join(f"{name}=/proc/self/fd/{handle}" for name, handle in zip(names, handles, strict=True))
        try:
            kernel.mount("overlay", target, "overlay", options=f"{options},{self._options}")
        finally:
            for handle in handles:
                os.close(handle)

    def _build(self, path: str) -> None:
        """Shows a folder with all that is mounted in it."""
        target = self._at(path)
        if path in _SHOWN:
            kernel.bind(path, target, kernel.RECURSIVE)
            if path == "/dev" and _SHARED_MEMORY in self._mounts:
                self._overlay(_SHARED_MEMORY, self._at(_SHARED_MEMORY))
            return
        below = self._below(path)
        try:
            self._overlay(path, target)
        except OSError:
            # In a user namespace, a folder with mounts cannot be overlaid in one piece.
            if below:
                self._build_parts(path)
            else:
                self._show_read_only(path)
            return
        for part in below:
            self._build(part)

    def _below(self, path: str) -> list[str]:
        """Returns the mount points in a folder, without those in other mounts."""
        inside = sorted(place for place in self._mounts if place != path and Path(path) in Path(place).parents)
        nearest = [place for place in inside if not any(Path(other) in Path(place).parents for other in inside)]
        return [place for place in nearest if os.path.lexists(place)]

    def _build_parts(self, path: str) -> None:
        """Shows a folder entry by entry."""
        kernel.mount("none", self._at(path), "tmpfs", options=f"mode={stat.S_IMODE(Path(path).stat().st_mode):o}")
        for entry in os.scandir(path):
            target = Path(self._at(entry.path))
            # Other programs may remove it meanwhile.
            with suppress(FileNotFoundError):
                if entry.is_symlink():
                    target.symlink_to(Path(entry.path).readlink())
                elif entry.is_dir():
                    target.mkdir()
                    self._build(entry.path)
                elif entry.is_file() and entry.stat().st_size <= _MOST_BYTES and os.access(entry.path, os.R_OK):
                    shutil.copy2(entry.path, target)
                else:
                    target.touch()
                    self._show_read_only(entry.path)

    def _show_read_only(self, path: str) -> None:
        target = self._at(path)
        kernel.bind(path, target, kernel.RECURSIVE)
        kernel.make_read_only(target)
        if os.access(path, os.W_OK):
            self.read_only.append(path)


def _copy_facts(source: Path, target: Path) -> None:
    found = source.stat()
    with suppress(OSError):
        os.chown(target, found.st_uid, found.st_gid)
    target.chmod(stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
