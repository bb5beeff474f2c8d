"""Reads one file of the idx format, MNIST's own, with bounded memory and without a trace on the disk.

The bytes are copied chunk by chunk into an anonymous file, hashed on the way, and only then parsed by torchvision's
reader. Nothing here starts a thread: the process that loads the data forks the ranks afterwards.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 1 << 18


class DamagedFileError(Exception):
    """A file is not what it should be; the message says what was found in it."""


class Readable(Protocol):
    """What bytes can be read from: a plain file, or one that is decompressed on the way."""

    def read(self, size: int, /) -> bytes:
        """Reads up to `size` bytes; none at the end."""


@dataclass(frozen=True, eq=False)
class Split:
    """One half of a data set.

    Args:
        images: Grey values, uint8 [N, 28, 28], 0 is the background.
        labels: Classes, int64 [N], from 0.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64]) -> Split:
        """Returns some samples, in this order; by numpy, since a torch operation in the parent might start threads."""
        if np.array_equal(indices, np.arange(len(self))):
            return self
        return Split(torch.from_numpy(self.images.numpy()[indices]), torch.from_numpy(self.labels.numpy()[indices]))


def decoded_size(shape: tuple[int, ...]) -> int:
    """Returns the bytes of an idx file: its header, then one byte per item, or four in QMNIST's table of labels."""
    return 4 * (1 + len(shape)) + math.prod(shape) * (4 if len(shape) == 2 else 1)


def read_idx(stream: Readable, shape: tuple[int, ...], sha256: str | None = None) -> torch.Tensor:
    """Reads one idx file of a known shape.

    Args:
        stream: The decoded bytes; of a stream that is too long, one chunk at most is read beyond the expected end.
        shape: Three numbers for images, one for labels, two for QMNIST's table of labels.
        sha256: Digest of the decoded bytes, checked before they are parsed; unset where none is known.

    Returns:
        Images, uint8 [N, 28, 28]; labels, int64 [N]; or a table, int32 [N, 8].

    Raises:
        DamagedFileError: The bytes are too few or too many, have another digest, or are no idx file of that shape.
        OSError, EOFError, zlib.error: What reading or decompressing the stream raises.

    Source: the format is described with the data, at http://yann.lecun.com/exdb/mnist/.
    """
    size = decoded_size(shape)
    with _anonymous_file() as copy:
        found_size, found_sha256 = _copy(stream, copy, size)
        if found_size > size:
            raise DamagedFileError(f"more than {size} bytes")
        if found_size < size or (sha256 is not None and found_sha256 != sha256):
            raise DamagedFileError(f"{found_size} bytes with SHA-256 {found_sha256}")
        return _parse(copy, shape)


@contextmanager
def _anonymous_file() -> Iterator[IO[bytes]]:
    """Yields a file without a name, in memory where the system can do that, as a temporary file elsewhere."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("idx"), "w+b") as file:
            yield file
    else:
        with tempfile.TemporaryFile() as file:
            yield file


def _copy(stream: Readable, copy: IO[bytes], size: int) -> tuple[int, str]:
    """Copies up to `size` + 1 bytes, and returns their number and their SHA-256."""
    digest, count = hashlib.sha256(), 0
    while chunk := stream.read(min(CHUNK, size + 1 - count)):
        digest.update(chunk)
        copy.write(chunk)
        count += len(chunk)
    copy.flush()
    copy.seek(0)
    return count, digest.hexdigest()


def _parse(copy: IO[bytes], shape: tuple[int, ...]) -> torch.Tensor:
    # torchvision takes more than a second to import, so only a process that reads data pays for it.
    from torchvision.datasets import mnist

    readers = {
        1: (mnist.read_label_file, torch.int64),
        2: (mnist.read_sn3_pascalvincent_tensor, torch.int32),
        3: (mnist.read_image_file, torch.uint8),
    }
    reader, dtype = readers[len(shape)]
    try:
        with one_thread():
            # The reader opens what it is given, and closes it: a descriptor of its own.
            tensor: torch.Tensor = reader(os.dup(copy.fileno()))
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # A file without a known digest may say anything in its header.
        raise DamagedFileError(f"no idx file of the shape {shape} ({type(error).__name__}: {error})") from error
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise DamagedFileError(f"items of the shape {tuple(tensor.shape)} and type {tensor.dtype}")
    return tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch from starting OpenMP threads inside: a forked child would wait for them for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
