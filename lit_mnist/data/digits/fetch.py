"""Fetches published archives once per machine: one process downloads under a file lock, the others wait for it.

A file appears under its own name only when it is whole and its MD5 is right, by a rename; what an interrupted download
left behind lies in a folder of its own, which the next download clears.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from lit_mnist.distributed.file_lock import open_lock, try_lock
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import InputError

NETWORK_TIMEOUT = 30.0  # seconds without a byte


class Archive(NamedTuple):
    """A file as it is published: its name, the addresses to fetch it from, the MD5 that torchvision knows of it."""

    name: str
    addresses: tuple[str, ...]
    md5: str


def fetch_missing(missing: Callable[[], list[Archive]], root: Path, folder: Path) -> None:
    """Downloads what is missing, unless another process just did; needs neither lock nor network if nothing is.

    Args:
        missing: Says which archives are missing; asked again once the lock is held.
        root: Folder of the lock file, created where needed.
        folder: Folder for the archives, inside `root`.

    Raises:
        InputError: An archive could not be fetched, or a folder could not be created or written.
    """
    if not missing():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(root, "download data into"):
            if archives := missing():
                _download(archives, folder)
    except OSError as error:
        raise InputError(
            f"The data cannot be kept in {folder}: {error}. Name a folder that can be written to with data.root."
        ) from error


def check_allowed(name: str, root: Path, *, allowed: bool) -> None:
    """Rejects to download or make data that a checkpoint names and the user did not ask for.

    Args:
        name: The data set's name.
        root: The folder that would get it.
        allowed: Whether the user did.

    Raises:
        InputError: The user did not.
    """
    if not allowed:
        raise InputError(
            f"The data set {name}, which the checkpoint names, is not in {root}. Nothing is written there because a "
            f"checkpoint says so: give --data.root with the folder that has it, or --data.name {name} --data.root "
            f"{shlex.quote(str(root))} to have it put there."
        )


@contextlib.contextmanager
def exclusive(root: Path, purpose: str) -> Iterator[None]:
    """Lets one process of this machine at a time do something in a folder; the others say that they wait for it.

    Args:
        root: The folder, which holds the lock file.
        purpose: What is done, as in "Waiting for another process to PURPOSE FOLDER."

    Raises:
        OSError: The lock file cannot be written or locked, or is a symbolic link.
    """
    with open_lock(root / ".download.lock") as lock:
        if not try_lock(lock):
            print_error(f"Waiting for another process to {purpose} {root}.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(archives: list[Archive], folder: Path) -> None:
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        by_hand = "\n".join(f"  {each.addresses[0]}" for each in archives)
        for archive in archives:
            advice = f"Check the network, or fetch these by hand and put them, as they are, into {folder}:\n{by_hand}"
            fetch(archive, partial, advice)
            (partial / archive.name).replace(folder / archive.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fetch(archive: Archive, folder: Path, advice: str) -> None:
    """Downloads one archive, whole and with the right MD5, or leaves a part of it behind.

    Args:
        archive: The archive.
        folder: Where it is put.
        advice: What the user can do if it cannot be fetched.

    Raises:
        InputError: It cannot be fetched.
    """
    failures = _try_addresses(archive, folder)
    if failures:
        raise InputError(f"{archive.name} could not be fetched ({'; '.join(failures)}). {advice}")


def _try_addresses(archive: Archive, partial: Path) -> list[str]:
    """Downloads an archive from the first address that has it; returns what failed, or nothing after a success."""
    from torchvision.datasets import utils

    failures = []
    for address in archive.addresses:
        try:
            with without_traces(utils.tqdm):
                utils.download_url(address, os.fspath(partial), archive.name, archive.md5)
        except (OSError, RuntimeError, HTTPException) as error:
            failures.append(f"{address}: {error}")
        else:
            return []
    return failures


@contextlib.contextmanager
def without_traces(bar: type) -> Iterator[None]:
    """Bounds the wait for a silent network, and keeps the progress bar from leaving its monitor thread behind.

    torchvision sets no timeout; the ranks are forked after the download, and a fork wants no other threads.
    """
    timeout, interval = socket.getdefaulttimeout(), getattr(bar, "monitor_interval", None)
    socket.setdefaulttimeout(NETWORK_TIMEOUT)
    bar.monitor_interval = 0  # type: ignore[attr-defined]
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)
        bar.monitor_interval = interval  # type: ignore[attr-defined]
