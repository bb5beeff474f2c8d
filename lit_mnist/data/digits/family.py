"""Relatives of MNIST: Fashion-MNIST, KMNIST, QMNIST and EMNIST, from the archives that torchvision's classes download.

Folders and file names are those of torchvision, so that one folder serves both. Nothing is extracted to the disk.

Each load verifies the MD5 of every archive, its gzip or zip checksums, the numbers of images and labels, and that every
label has a class. If an archive is missing but the extracted file is there, that file is used, and the source states
this: its size, header and range of labels are checked, but not its content.
"""

from __future__ import annotations

import gzip
import hashlib
import zipfile
import zlib
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch

from lit_mnist.data.digits.mnist import DamagedFileError, read_idx
from lit_mnist.data.digits.split import Split
from lit_mnist.data.download import Archive, check_allowed, check_md5, fetch, is_file, locked_folder, user_cache
from lit_mnist.data.torch_internals import CLASSES, digit_archives
from lit_mnist.errors import InputError

# Published numbers of training and test samples.
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
        The source: the folder and what was verified; the SHA-256 over the bytes of the four tensors (training images,
        training labels, test images, test labels); the training and the test split.

    Raises:
        InputError: A file cannot be downloaded or read, or is damaged.
    """
    root = root or user_cache()
    folder = root / CLASSES[name] / "raw"
    files = digit_archives(name, emnist_split)

    def missing() -> list[Archive]:
        absent = (
            archive
            for file, archive in files.items()
            if not is_file(folder / archive.name) and not is_file(folder / file)
        )
        return list(dict.fromkeys(absent))

    if missing():
        check_allowed(name, root, allowed=fetch_missing)
        with locked_folder(root):
            if archives := missing():
                folder.mkdir(parents=True, exist_ok=True)
                fetch(archives, folder)
    counts = COUNTS[f"emnist/{emnist_split}" if name == "emnist" else name]
    with ExitStack() as stack:
        opened = {archive: _open_verified(folder, archive, stack) for archive in dict.fromkeys(files.values())}
        shapes = [shape for n in counts for shape in ((n, 28, 28), (n, 8) if name == "qmnist" else (n,))]
        images, labels, test_images, test_labels = (
            _read(folder, file, opened[archive], shape)
            for (file, archive), shape in zip(files.items(), shapes, strict=True)
        )
    verified = "only the sizes of extracted files verified" if None in opened.values() else "MD5 verified"
    first = 1 if name == "emnist" and emnist_split == "letters" else 0
    train = _split(images, labels, upright=name != "emnist", first=first)
    test = _split(test_images, test_labels, upright=name != "emnist", first=first)
    digest = hashlib.sha256()
    for split in (train, test):
        _check_labels(split.labels.numpy(), num_classes, folder)
        digest.update(split.images.numpy().data)
        digest.update(split.labels.numpy().astype("<i8", copy=False).data)
    return f"{folder} ({verified})", digest.hexdigest(), train, test


def _open_verified(folder: Path, archive: Archive, stack: ExitStack) -> BufferedReader | None:
    """Opens an archive and checks its MD5. Returns None if the archive is missing, but its extracted files exist."""
    path = folder / archive.name
    try:
        file = stack.enter_context(path.open("rb"))
        check_md5(file, archive)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}. Set data.root to another folder.") from error
    return file


def _read(folder: Path, file: str, archive: BufferedReader | None, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    try:
        with ExitStack() as stack:
            if archive is None:
                return read_idx(stack.enter_context((folder / file).open("rb")), shape)
            archive.seek(0)
            packed: IO[bytes] = archive
            if archive.name.endswith(".zip"):
                packed = stack.enter_context(stack.enter_context(zipfile.ZipFile(archive)).open(f"gzip/{file}.gz"))
            return read_idx(stack.enter_context(gzip.GzipFile(fileobj=packed)), shape)
    except DamagedFileError as error:
        found = str(error)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        found = f"{type(error).__name__}: {error}"
    raise InputError(
        f"{file} in {folder} cannot be used: expected an idx file of the shape {shape}, found {found}. Delete it, and "
        "its archive, to have them downloaded again."
    )


def _split(images: npt.NDArray[np.generic], labels: npt.NDArray[np.generic], *, upright: bool, first: int) -> Split:
    # numpy, because torch might start threads before the fork.
    if not upright:
        images = np.ascontiguousarray(images.transpose(0, 2, 1))
    classes = (labels if labels.ndim == 1 else labels[:, 0]).astype(np.int64) - first
    return Split(torch.from_numpy(images), torch.from_numpy(classes))


def _check_labels(labels: npt.NDArray[np.int64], num_classes: int, folder: Path) -> None:
    if labels.min() < 0 or labels.max() >= num_classes:
        raise InputError(
            f"The labels in {folder} are damaged: expected {num_classes} classes from 0, found labels from "
            f"{labels.min()} to {labels.max()}. Delete the files to have them downloaded again."
        )
