"""Calls of the Linux kernel that Python 3.11 lacks."""

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DETACH = 2
_NO_NEW_PRIVILEGES = 38
_CAPABILITIES_3 = 0x20080522
# Flags of a mount as statvfs names them, and as mount takes them.
_KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
# What a Landlock ruleset denies, by the version that has it: writing, removing and creating; moving; truncating.
_RIGHTS = {1: 0b1_1111_1111_0010, 2: 1 << 13, 3: 1 << 14}

# The first version denies every move between folders.
LEAST_LANDLOCK = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> int:
    result = int(getattr(_libc, name)(*args))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Moves this process to new namespaces; it must have one thread."""
    _call("unshare", flags)


def enter(namespaces: Sequence[str]) -> None:
    """Moves this process to the namespaces of these files; it must have one thread."""
    # In the first one, this process may not see the files of the others.
    for handle in [os.open(path, os.O_RDONLY) for path in namespaces]:
        _call("setns", handle, 0)
        os.close(handle)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mounts a file system."""
    _call("mount", *(os.fsencode(text) for text in (source, target, kind)), ctypes.c_ulong(flags), options.encode())


def bind(source: str, target: str, flags: int = 0) -> None:
    """Shows a file or folder in a second place."""
    mount(source, target, flags=BIND | flags)


def make_read_only(target: str) -> None:
    """Makes a mount read-only; flags that the kernel has locked stay as they are."""
    found = os.statvfs(target).f_flag
    kept = sum(flag for own, flag in _KEPT_FLAGS.items() if found & own)
    mount("", target, flags=BIND | REMOUNT | READ_ONLY | kept)


def unmount(target: str) -> None:
    """Removes a mount as soon as nothing uses it."""
    _call("umount2", os.fsencode(target), _DETACH)


def change_root(root: str) -> None:
    """Makes a mount the root, and removes the old one from this mount namespace."""
    os.chdir(root)
    _call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def drop_capabilities() -> None:
    """Gives up the rights of root that a new user namespace grants."""
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    _call("capset", header, bytes(24))


def landlock_version() -> int:
    """Returns the version of Landlock; 0 if the kernel has none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def allow_writes_below(folders: Sequence[Path]) -> None:
    """Denies this process and its children to write, create and remove files elsewhere, until they end.

    Raises:
        OSError: The kernel does not support it.
    """
    version = landlock_version()
    rights = sum(bits for least, bits in _RIGHTS.items() if least <= version)
    ruleset = _call("syscall", _CREATE_RULESET, struct.pack("=Q", rights), ctypes.c_size_t(8), 0)
    for folder in folders:
        handle = os.open(folder, os.O_PATH)
        _call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, handle), 0)
        os.close(handle)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
