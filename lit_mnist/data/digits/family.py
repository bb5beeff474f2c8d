"""MNIST's relatives: Fashion-MNIST, KMNIST, QMNIST and EMNIST, as torchvision's classes know them.

The folders, file names, addresses and MD5 sums are those of torchvision's classes, so that a folder filled by either
serves both. Only the archives as they are published are downloaded and read; nothing is extracted to the disk.

What is verified at each load: the MD5 of every archive that is read, its gzip or zip checksums, that the numbers of
images and labels are the published ones, and that every label has a class. Where an archive was deleted and only a
file extracted from it is left, that file is used, and the source says so: of such a file the size, the header and the
range of the labels are checked, but not the content. An MD5 tells damage, not malice.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
import numpy.typing as npt
import torch

from lit_mnist.data.digits.fetch import Archive, check_allowed, fetch_missing
from lit_mnist.data.digits.idx import DamagedFileError, Readable, Split, read_idx
from lit_mnist.errors import InputError

TORCHVISION_CLASSES = {"fashion_mnist": "FashionMNIST", "kmnist": "KMNIST", "qmnist": "QMNIST", "emnist": "EMNIST"}
# Samples for training and for test, as published.
COUNTS = {
    "fashion_mnist": (60_000, 10_000),
    "kmnist": (60_000, 10_000),
    "qmnist": (60_000, 60_000),
    "emnist/byclass": (697_932, 116_323),
    "emnist/bymerge": (697_932, 116_323),
    "emnist/balanced": (112_800, 18_800),
    "emnist/letters": (124_800, 20_800),
    "emnist/digits": (240_000, 40_000),
    "emnist/mnist": (60_000, 10_000),
}


def load_family(
    name: str, root: Path | None, emnist_split: str, num_classes: int, *, fetch: bool = True
) -> tuple[str, str, Split, Split]:
    """Loads one of MNIST's relatives, downloading it where it is missing.

    EMNIST's images are turned upright (they are stored transposed), its letters counted from 0 instead of 1; of
    QMNIST's table the first column, the class, is taken, with all 60,000 test samples.

    Args:
        name: `fashion_mnist`, `kmnist`, `qmnist` or `emnist`.
        root: Folder that torchvision would be given; without one `$XDG_CACHE_HOME/lit_mnist` or `~/.cache/lit_mnist`.
        emnist_split: Which of EMNIST's splits.
        num_classes: Number of classes that the labels must lie within.
        fetch: Whether missing files may be downloaded.

    Returns:
        The source: the folder and what was verified; the SHA-256 over the bytes of the four tensors as returned
        (training images, training labels, test images, test labels); the training and the test split.

    Raises:
        InputError: A file cannot be fetched or read, or is damaged.
    """
    root = root or user_cache()
    folder = root / TORCHVISION_CLASSES[name] / "raw"
    wanted = _archives(name, emnist_split)

    def missing() -> list[Archive]:
        absent = [archive for file, archive in wanted.items() if not _exists(folder / archive.name, folder / file)]
        return list(dict.fromkeys(absent))

    if not fetch and missing():
        check_allowed(name, root, allowed=False)
    fetch_missing(missing, root, folder)
    with contextlib.ExitStack() as stack:
        opened = {archive: _open_verified(folder, archive, stack) for archive in dict.fromkeys(wanted.values())}
        train_images, train_labels, test_images, test_labels = (
            _read(folder, file, opened[archive], shape)
            for (file, archive), shape in zip(wanted.items(), _shapes(name, emnist_split), strict=True)
        )
    verified = "only the sizes of extracted files verified" if None in opened.values() else "MD5 verified"
    train = _normalised(train_images, train_labels, name, emnist_split)
    test = _normalised(test_images, test_labels, name, emnist_split)
    for split in (train, test):
        _check_labels(split.labels.numpy(), num_classes, folder)
    return f"{folder} ({verified})", _digest(train, test), train, test


def user_cache() -> Path:
    """Returns the folder for data of this user: `$XDG_CACHE_HOME/lit_mnist` or `~/.cache/lit_mnist`.

    Raises:
        InputError: The user has no home.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "lit_mnist"
    except RuntimeError as error:
        raise InputError(f"There is no folder for the data: {error} Name one with data.root.") from error


def _exists(*paths: Path) -> bool:
    try:
        return any(path.is_file() for path in paths)
    except OSError as error:
        raise InputError(f"{paths[0]} cannot be looked up: {error}. Name another folder with data.root.") from error


def _archives(name: str, emnist_split: str) -> dict[str, Archive]:
    """Returns the archive of each extracted file: training images and labels, then test images and labels."""
    from torchvision import datasets

    published = getattr(datasets, TORCHVISION_CLASSES[name])
    if name == "emnist":
        archive = Archive(PurePosixPath(published.url).name, (published.url,), published.md5)
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return {f"emnist-{emnist_split}-{part}-{kind}": archive for part in ("train", "test") for kind in kinds}
    if name == "qmnist":
        resources, mirrors = [*published.resources["train"], *published.resources["test"]], [""]
    else:
        resources, mirrors = published.resources, published.mirrors
    archives = [
        Archive(PurePosixPath(file).name, tuple(f"{mirror}{file}" for mirror in mirrors), md5)
        for file, md5 in resources
    ]
    return {PurePosixPath(archive.name).stem: archive for archive in archives}


def _shapes(name: str, emnist_split: str) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of what the files hold, in the order of `_archives`."""
    for count in COUNTS[f"emnist/{emnist_split}" if name == "emnist" else name]:
        yield (count, 28, 28)
        yield (count, 8) if name == "qmnist" else (count,)


def _open_verified(folder: Path, archive: Archive, stack: contextlib.ExitStack) -> IO[bytes] | None:
    """Opens an archive whose MD5 is right; returns None where there is no archive but the files extracted from it."""
    path = folder / archive.name
    try:
        file = stack.enter_context(path.open("rb"))
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}. Name another folder with data.root.") from error
    if found != archive.md5:
        raise InputError(
            f"{path} is damaged: expected the MD5 {archive.md5}, found {found}. Delete it to have it downloaded "
            f"again, or replace it by {archive.addresses[0]}"
        )
    return file


@contextlib.contextmanager
def _decoded(folder: Path, file: str, archive: IO[bytes] | None) -> Iterator[Readable]:
    with contextlib.ExitStack() as stack:
        if archive is None:
            yield stack.enter_context((folder / file).open("rb"))
            return
        archive.seek(0)
        packed = archive
        if archive.name.endswith(".zip"):
            packed = stack.enter_context(stack.enter_context(zipfile.ZipFile(archive)).open(f"gzip/{file}.gz"))
        yield stack.enter_context(gzip.GzipFile(fileobj=packed))


def _read(folder: Path, file: str, archive: IO[bytes] | None, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        with _decoded(folder, file, archive) as stream:
            return read_idx(stream, shape)
    except DamagedFileError as error:
        found = str(error)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        found = f"{type(error).__name__}: {error}"
    raise InputError(
        f"{file} in {folder} cannot be used: expected an idx file of the shape {shape}, found {found}. Delete it, and "
        "its archive, to have them downloaded again."
    )


def _normalised(images: torch.Tensor, labels: torch.Tensor, name: str, emnist_split: str) -> Split:
    # In numpy, which starts no threads that a later fork could trip over.
    if name == "qmnist":
        return Split(images, torch.from_numpy(labels.numpy()[:, 0].astype(np.int64)))
    if name == "emnist":
        images = torch.from_numpy(np.ascontiguousarray(images.numpy().transpose(0, 2, 1)))
        if emnist_split == "letters":
            labels = torch.from_numpy(labels.numpy() - 1)
    return Split(images, labels)


def _check_labels(labels: npt.NDArray[np.int64], num_classes: int, folder: Path) -> None:
    if labels.min() < 0 or labels.max() >= num_classes:
        raise InputError(
            f"The labels in {folder} are damaged: expected {num_classes} classes from 0, found labels from "
            f"{labels.min()} to {labels.max()}. Delete the files to have them downloaded again."
        )


def _digest(*splits: Split) -> str:
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.images.numpy().data)
        digest.update(split.labels.numpy().astype("<i8", copy=False).data)
    return digest.hexdigest()
