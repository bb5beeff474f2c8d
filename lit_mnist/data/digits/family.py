"""Relatives of MNIST: Fashion-MNIST, KMNIST, QMNIST and EMNIST, by torchvision's classes.

They are downloaded once per machine, under a lock, into an unfinished folder that is renamed when it is complete.
torchvision verifies the MD5 of each archive then. The SHA-256 of the content is in `result.json` and in checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from lit_mnist.data.digits.split import Split
from lit_mnist.distributed.terminal import print_error
from lit_mnist.distributed.threads import single_thread
from lit_mnist.errors import InputError

CLASSES = {"fashion_mnist": "FashionMNIST", "kmnist": "KMNIST", "qmnist": "QMNIST", "emnist": "EMNIST"}
NETWORK_TIMEOUT = 30.0  # seconds without a byte


def load_family(
    name: str, root: Path | None, emnist_split: str, num_classes: int, *, fetch_missing: bool = True
) -> tuple[str, str, Split, Split]:
    """Loads a relative of MNIST, and downloads it if it is missing.

    EMNIST's images are stored transposed and are returned upright; its letters are counted from 0 instead of 1. The
    class is the first column of QMNIST's table of labels; all 60,000 test samples are used.

    Args:
        name: `fashion_mnist`, `kmnist`, `qmnist` or `emnist`.
        root: The folder, as torchvision expects it; by default the user's cache.
        emnist_split: The split of EMNIST.
        num_classes: Number of classes.
        fetch_missing: Whether missing files may be downloaded.

    Returns:
        The folder; the SHA-256 over the bytes of the four tensors (training images, training labels, test images, test
        labels); the training and the test split.

    Raises:
        InputError: The files cannot be downloaded or read, or are damaged.
    """
    root = root or _user_cache()
    folder = root / CLASSES[name]
    parts = _read(name, root, emnist_split)
    if parts is None:
        if not fetch_missing:
            raise InputError(
                f"The checkpoint names the data set {name}, which is not in {root}. A checkpoint alone does not cause "
                f"a write: give --data.root with the folder that has the data, or --data.name {name} --data.root "
                f"{shlex.quote(str(root))} to create them there."
            )
        _download(name, root, emnist_split)
        parts = _read(name, root, emnist_split)
    assert parts
    digest, splits = hashlib.sha256(), []
    first = int(name == "emnist" and emnist_split == "letters")
    for part in parts:
        images, labels = part.data.numpy(), part.targets.numpy()
        if name == "emnist":
            images = np.ascontiguousarray(images.transpose(0, 2, 1))
        labels = np.ascontiguousarray(labels if labels.ndim == 1 else labels[:, 0]) - first
        if images.shape != (len(labels), 28, 28) or labels.min() < 0 or labels.max() >= num_classes:
            raise InputError(
                f"{folder} is damaged: its images {list(images.shape)} and {len(labels)} labels from {labels.min()} to "
                f"{labels.max()} are not {num_classes} classes from 0. Remove it to have it downloaded again."
            )
        digest.update(images.data)
        digest.update(labels.astype("<i8", copy=False).data)
        splits.append(Split(torch.from_numpy(images), torch.from_numpy(labels)))
    return str(folder), digest.hexdigest(), *splits  # type: ignore[return-value]


def _read(name: str, root: Path, emnist_split: str, *, download: bool = False) -> list[Any] | None:
    """Returns torchvision's training and test set; None if files are missing."""
    from torchvision import datasets

    options = {"split": emnist_split} if name == "emnist" else {}
    try:
        with single_thread():
            return [
                getattr(datasets, CLASSES[name])(root, train=train, download=download, **options)
                for train in (True, False)
            ]
    except Exception as error:
        if download:
            raise
        # torchvision raises errors of many kinds for a damaged file.
        if "Dataset not found" in str(error):
            return None
        raise InputError(
            f"{root / CLASSES[name]} cannot be read ({type(error).__name__}: {error}). Remove it to have it downloaded "
            "again, or change data.root."
        ) from error


def _download(name: str, root: Path, emnist_split: str) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    # The progress bar must not start a thread: the process forks the ranks afterwards.
    tqdm.monitor_interval = 0
    timeout = socket.getdefaulttimeout()
    try:
        with locked_folder(root):
            if _read(name, root, emnist_split) is not None:
                return
            with partial_folder(root / ".partial") as partial:
                target = root / CLASSES[name]
                # Archives that the user has put there are not downloaded again.
                if target.exists():
                    shutil.copytree(target, partial / target.name)
                socket.setdefaulttimeout(NETWORK_TIMEOUT)
                _read(name, partial, emnist_split, download=True)
                shutil.rmtree(target, ignore_errors=True)
                (partial / target.name).rename(target)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{name} cannot be downloaded to {root}: {reason}. Check the network, set data.root to a writable folder, "
            f"or put torchvision's files into {root / CLASSES[name] / 'raw'}."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates a folder and holds its lock. A process that waits prints a message.

    Raises:
        OSError: The folder or the lock file cannot be written or locked, or the file is a symbolic link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Without flock, the library would use a lock that outlives a killed process.
    lock = FileLock(folder / ".download.lock", fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print_error(f"Waiting for another process to download data into {folder}.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


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


def _user_cache() -> Path:
    """Returns the user's folder for data: `$XDG_CACHE_HOME/lit_mnist` or `~/.cache/lit_mnist`."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "lit_mnist"
    except RuntimeError as error:
        raise InputError(f"There is no folder for the data: {error} Set data.root.") from error
