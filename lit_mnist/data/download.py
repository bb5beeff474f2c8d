"""Downloads published archives once per machine: one process downloads under a file lock, the others wait.

A file is renamed to its own name only when it is complete and its MD5 is correct. An interrupted download leaves a
folder `.partial`, which the next download removes.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import InputError

NETWORK_TIMEOUT = 30.0  # seconds without a byte


class Archive(NamedTuple):
    """A published file: its name, its addresses in order of preference, and its MD5 (32 hexadecimal digits)."""

    name: str
    addresses: tuple[str, ...]
    md5: str


def user_cache() -> Path:
    """Returns the user's folder for data: `$XDG_CACHE_HOME/lit_mnist` or `~/.cache/lit_mnist`.

    Raises:
        InputError: The user has no home folder.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "lit_mnist"
    except RuntimeError as error:
        raise InputError(f"There is no folder for the data: {error} Set data.root.") from error


def is_file(path: Path) -> bool:
    """Returns whether a path is a regular file; raises InputError if it cannot be accessed."""
    try:
        return path.is_file()
    except OSError as error:
        raise InputError(f"{path} cannot be accessed: {error}. Make it readable, or change data.root.") from error


def check_allowed(name: str, root: Path, *, allowed: bool) -> None:
    """Raises InputError if only a checkpoint, and not the user, asks for data to be written to `root`."""
    if not allowed:
        raise InputError(
            f"The checkpoint names the data set {name}, which is not in {root}. A checkpoint alone does not cause a "
            f"write: give --data.root with the folder that has the data, or --data.name {name} --data.root "
            f"{shlex.quote(str(root))} to create them there."
        )


@contextmanager
def exclusive(folder: Path, purpose: str) -> Iterator[None]:
    """Holds a lock in a folder. A process that waits prints a message with the purpose and the folder.

    Raises:
        OSError: The lock file cannot be written or locked, or is a symbolic link.
    """
    # Without flock, the library would use a lock that outlives a killed process.
    lock = FileLock(folder / ".download.lock", fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print_error(f"Waiting for another process to {purpose} {folder}.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_folder(folder: Path, purpose: str = "download data into") -> Iterator[None]:
    """Creates a folder and holds its lock; see `exclusive`.

    Raises:
        InputError: Writing to the folder fails, here or in the body.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder, purpose):
            yield
    except OSError as error:
        raise InputError(
            f"The data cannot be written to {folder}: {error}. Set data.root to a writable folder."
        ) from error


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Creates an empty folder for unfinished files, and removes it at the end."""
    shutil.rmtree(path, ignore_errors=True)
    # Without exist_ok: the files would follow a symbolic link of another user.
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def fetch(archives: list[Archive], folder: Path) -> None:
    """Downloads archives into a folder whose lock the caller holds, and checks the MD5 of each.

    Raises:
        InputError: An archive cannot be downloaded from any of its addresses.
        OSError: The folder cannot be written to.
    """
    with partial_folder(folder / ".partial") as partial:
        for archive in archives:
            failures = []
            for address in archive.addresses:
                try:
                    download(address, partial / archive.name)
                    with (partial / archive.name).open("rb") as file:
                        check_md5(file, archive)
                    break
                except (InputError, OSError, HTTPException) as error:
                    failures.append(f"{address}: {error}")
            else:
                manual = "\n".join(f"  {each.addresses[0]}" for each in archives)
                raise InputError(
                    f"{archive.name} could not be fetched ({'; '.join(failures)}). Check the network, or download "
                    f"these files by hand and put them, unchanged, into {folder}:\n{manual}"
                )
            (partial / archive.name).replace(folder / archive.name)


def download(address: str, path: Path) -> None:
    """Downloads one file, without a thread: the process forks the ranks afterwards.

    Raises:
        OSError, HTTPException: The address cannot be reached, sends nothing for 30 seconds, or the file cannot be
            written.
    """
    print_error(f"Downloading {address}.")
    request = urllib.request.Request(address, headers={"User-Agent": "lit_mnist"})  # noqa: S310 the addresses are torchvision's
    with urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT) as response, path.open("wb") as file:  # noqa: S310
        shutil.copyfileobj(response, file)


def check_md5(file: BufferedReader, archive: Archive) -> None:
    """Raises InputError if the MD5 of an open archive is wrong. An MD5 detects damage, not an attack."""
    found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        raise InputError(
            f"{file.name} is damaged: expected the MD5 {archive.md5}, found {found}. Delete it to have it downloaded "
            f"again, or replace it by {archive.addresses[0]}"
        )
