"""A copy-on-write view of all files, in which a run writes: overlays in a separate mount namespace.

A process of the doctor makes the view, and the ranks of the run enter it. It ends with its last process, so nothing
has to be undone if the doctor is killed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_doctor.files import kernel
from ddp_doctor.processes import die_with_parent

# File systems of the kernel, which are no files of the user. Devices are shown as they are.
_SHOWN = {
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs",
    "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs",
    "tracefs",
}  # fmt: skip
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
# A larger file beside a mount is shown read-only, and not copied.
_MOST_BYTES = 16 << 20


def mounts() -> dict[str, str]:
    """Returns the kind of file system by mount point."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        found[place] = fields[fields.index("-") + 1]
    return found


def separate() -> bool:
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


def enter(namespaces: Sequence[str], cwd: str) -> None:
    """Moves this process, which must have one thread, into a view."""
    kernel.enter(namespaces)
    os.chdir(cwd)
    if os.geteuid():
        kernel.drop_capabilities()
    die_with_parent()


class PrivateView:
    """The view of this process, whose mount namespace must be its own.

    Args:
        folder: Folder of the examination, which stays as it is for all.
        layers: Empty folder for what is written; it must be in the folder of the examination.
        in_user_namespace: Whether this process has a separate user namespace.
        foreign: Folders that are made in the layers before, because the kernel cannot copy them there.

    Attributes:
        read_only: Folders that this user may write, but the run may not, because the kernel cannot overlay them.
        places: The folder that each layer covers, by the name of the layer.
        in_memory: Whether the layers are in memory, because the temporary folder cannot hold them.
    """

    def __init__(self, folder: Path, layers: Path, *, in_user_namespace: bool, foreign: Sequence[str] = ()) -> None:
        self.folder, self.layers, self.foreign = str(folder), layers, foreign
        self.read_only: list[str] = []
        self.places: dict[str, str] = {}
        self.in_memory = False
        self._root = str(layers / "root")
        # redirect_dir lets folders be renamed; it needs the rights of root.
        self._options = "userxattr" if in_user_namespace else "redirect_dir=on"
        self._mounts: dict[str, str] = {}
        self._count = 0

    def make(self) -> None:
        """Makes the view the root of this process.

        Raises:
            OSError: The kernel does not permit it.
        """
        kernel.mount("", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
        self._mounts = mounts()
        self._try()
        self._build("/")
        shown = self._at(self.folder)
        kernel.bind(self.folder, shown)
        if not self.in_memory:
            kernel.mount("none", self._at(str(self.layers)), "tmpfs", options="mode=700")
        kernel.change_root(self._root)

    def _at(self, path: str) -> str:
        return f"{self._root}{path}".rstrip("/")

    def _try(self) -> None:
        """Tries an overlay; the layers are in memory if the temporary folder does not support it."""
        for self.in_memory in (False, True):
            if self.in_memory:
                kernel.mount("none", str(self.layers), "tmpfs", options="mode=700")
            Path(self._root).mkdir()
            empty = self.layers / "empty"
            empty.mkdir()
            try:
                self._overlay(str(empty), self._root)
            except OSError:
                if self.in_memory:
                    raise
            else:
                kernel.unmount(self._root)
                self.places.clear()
                return

    def _overlay(self, lower: str, target: str) -> None:
        number, self._count = str(self._count), self._count + 1
        upper, work = self.layers / number / "files", self.layers / number / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        _copy_facts(Path(lower), upper)
        for folder in self._foreign_in(lower):
            made = upper / folder.relative_to(lower)
            made.mkdir(exist_ok=True)
            _copy_facts(folder, made)
        # Paths may have characters that separate the options.
        handles = [os.open(path, os.O_PATH) for path in (lower, upper, work)]
        names = ("lowerdir", "upperdir", "workdir")
        options = ",".join(f"{name}=/proc/self/fd/{handle}" for name, handle in zip(names, handles, strict=True))
        try:
            kernel.mount("overlay", target, "overlay", options=f"{options},{self._options}")
            self.places[number] = lower
        finally:
            for handle in handles:
                os.close(handle)

    def _foreign_in(self, lower: str) -> list[Path]:
        """Returns the foreign folders of a folder that are in no other mount."""
        inside = [Path(place) for place in self.foreign if Path(lower) in Path(place).parents]
        return [path for path in inside if not any(path.is_relative_to(place) for place in self._below(lower))]

    def _build(self, path: str) -> None:
        """Shows a folder with all that is mounted in it."""
        target, kind = self._at(path), self._mounts.get(path)
        if path == "/dev" or kind in _SHOWN:
            kernel.bind(path, target, kernel.RECURSIVE)
            if path == "/dev" and _SHARED_MEMORY in self._mounts:
                self._overlay(_SHARED_MEMORY, self._at(_SHARED_MEMORY))
            return
        if not Path(path).is_dir():
            self._show_read_only(path)
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
            # Other programs may remove it meanwhile.
            with suppress(FileNotFoundError):
                self._build_part(entry)

    def _build_part(self, entry: os.DirEntry[str]) -> None:
        target = Path(self._at(entry.path))
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
