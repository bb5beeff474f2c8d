"""MNIST from the files in the package or from a user's folder, verified by SHA-256 at each load.

The files have the idx format. They are read with bounded memory and without starting a thread: the process forks the
ranks afterwards, and a thread of numpy or torch would not survive the fork.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lit_mnist.data.digits.split import Split
from lit_mnist.errors import InputError

_CHUNK = 1 << 18
EMBEDDED = Path(__file__).parent / "files"


class OfficialFile(NamedTuple):
    """One of the four files: its name, the shape of its content, and the SHA-256 of its decoded bytes."""

    name: str
    shape: tuple[int, ...]
    sha256: str


FILES = (
    OfficialFile(
        "train-images-idx3-ubyte", (60_000, 28, 28), "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    OfficialFile(
        "train-labels-idx1-ubyte", (60_000,), "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    OfficialFile(
        "t10k-images-idx3-ubyte", (10_000, 28, 28), "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
    OfficialFile(
        "t10k-labels-idx1-ubyte", (10_000,), "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
)


def load_mnist(root: Path | None) -> tuple[str, str, Split, Split]:
    """Loads MNIST.

    Args:
        root: A folder with the four files in it, in its `raw` or in its `MNIST/raw`, each as `.gz` (preferred) or
            decoded; no other file is read. By default, the files of the package.

    Returns:
        The source, `embedded` or the folder with the form of its files; the SHA-256 over the four files' SHA-256
        (32 bytes each, training images, training labels, test images, test labels); the training and the test split.

    Raises:
        InputError: A file is missing, cannot be read, or does not contain the official bytes.
    """
    if root is None:
        paths = [EMBEDDED / f"{file.name}.gz" for file in FILES]
        source, advice = "embedded", "Reinstall the package."
    else:
        paths = _find(root)
        forms = sorted({".gz" if path.suffix == ".gz" else "decoded" for path in paths})
        source = f"{paths[0].parent} ({' and '.join(forms)})"
        advice = "Replace it by the official file, or leave data.root unset to use the files of the package."
    images, labels, test_images, test_labels = (
        _read(path, file, advice) for path, file in zip(paths, FILES, strict=True)
    )
    sha256 = hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in FILES)).hexdigest()
    return source, sha256, Split(images, labels), Split(test_images, test_labels)


def _read(path: Path, file: OfficialFile, advice: str) -> torch.Tensor:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            values = read_idx(stream, file.shape, file.sha256)
        return torch.from_numpy(values if values.ndim > 1 else values.astype(np.int64))
    except DamagedFileError as error:
        found = str(error)
    except (OSError, EOFError, zlib.error) as error:
        found = f"that it cannot be read ({type(error).__name__}: {error})"
    raise InputError(
        f"{path} is not MNIST's {file.name}: expected decoded bytes with SHA-256 {file.sha256}, found {found}. {advice}"
    )


def _find(root: Path) -> list[Path]:
    """Returns the paths of the four files in the first folder that has all of them."""
    most, lacking = -1, ""
    for folder in (root, root / "raw", root / "MNIST" / "raw"):
        choices = [(folder / f"{file.name}.gz", folder / file.name) for file in FILES]
        paths = [path for path in (next(filter(_is_file, choice), None) for choice in choices) if path]
        if len(paths) == len(FILES):
            return paths
        if len(paths) > most:
            names = [file.name for file in FILES if not any(path.name.startswith(file.name) for path in paths)]
            most, lacking = len(paths), f"{folder} lacks {', '.join(names)}"
    raise InputError(
        f"MNIST is not in {root}, its raw or its MNIST/raw: {lacking}. Expected are the four official files in one of "
        "these folders, each as .gz or decoded. Put them there, or leave data.root unset to use the files of the "
        "package."
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise InputError(f"{path} cannot be accessed: {error}. Make it readable, or change data.root.") from error


class DamagedFileError(Exception):
    """A file does not have the expected content; the message says what was found."""


def read_idx(stream: io.BufferedIOBase, shape: tuple[int, ...], sha256: str) -> npt.NDArray[np.uint8]:
    """Reads one idx file of a known shape.

    Args:
        stream: The decoded bytes, of which at most one more than expected is read.
        shape: Three numbers for images, one for labels.
        sha256: Digest of the decoded bytes.

    Raises:
        DamagedFileError: The size or the digest is wrong.
        OSError, EOFError, zlib.error: Raised by the stream.

    The format is described with the data, at http://yann.lecun.com/exdb/mnist/.
    """
    header = 4 * (1 + len(shape))
    size = header + math.prod(shape)
    content, count = bytearray(size + 1), 0
    view = memoryview(content)
    while read := stream.readinto(view[count : count + _CHUNK]):
        count += read
    if count > size:
        raise DamagedFileError(f"more than {size} bytes")
    found = hashlib.sha256(view[:count]).hexdigest()
    if found != sha256:
        raise DamagedFileError(f"{count} bytes with SHA-256 {found}")
    return np.frombuffer(content, np.uint8, count=math.prod(shape), offset=header).reshape(shape)
