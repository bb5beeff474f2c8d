"""Reads files of the idx format, which is that of MNIST, with bounded memory and without starting a thread.

The process that reads the data forks the ranks afterwards: a thread of numpy or torch would not survive the fork.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 18
# By the number of dimensions: the type of the items, and its code in the header. QMNIST's labels are a table.
_TYPES = {1: ("u1", 0x08), 2: (">i4", 0x0C), 3: ("u1", 0x08)}


class DamagedFileError(Exception):
    """A file does not have the expected content; the message says what was found."""


def read_idx(stream: io.BufferedIOBase, shape: tuple[int, ...], sha256: str | None = None) -> npt.NDArray[np.generic]:
    """Reads one idx file of a known shape.

    Args:
        stream: The decoded bytes, of which at most one more than expected is read.
        shape: Three numbers for images, one for labels, two for QMNIST's table of labels.
        sha256: Digest of the decoded bytes, if it is known.

    Returns:
        Images or labels as uint8, a table as big-endian int32, in the given shape.

    Raises:
        DamagedFileError: The size, the digest or the header is another.
        OSError, EOFError, zlib.error: Raised by the stream.

    The format is described with the data, at http://yann.lecun.com/exdb/mnist/.
    """
    dtype, code = _TYPES[len(shape)]
    header = struct.pack(f">{1 + len(shape)}I", code << 8 | len(shape), *shape)
    size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
    content, count = bytearray(size + 1), 0
    view = memoryview(content)
    while read := stream.readinto(view[count : count + _CHUNK]):
        count += read
    if count > size:
        raise DamagedFileError(f"more than {size} bytes")
    found = hashlib.sha256(view[:count]).hexdigest() if sha256 or count < size else None
    if count < size or found != sha256:
        raise DamagedFileError(f"{count} bytes with SHA-256 {found}")
    if view[: len(header)] != header:
        raise DamagedFileError(f"the header {view[: len(header)].hex(' ', 4)} instead of {header.hex(' ', 4)}")
    return np.frombuffer(content, dtype, count=math.prod(shape), offset=len(header)).reshape(shape)
