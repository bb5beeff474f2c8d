"""The SHA-256 of a file of torch.save, in the comment of the archive: torch and Lightning load the file as before.

The hash is that of the file without the comment, so that it covers every byte that a reader interprets.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from typing import IO

# The end of an archive without a comment: a signature, 16 bytes, and the length of the comment.
_END = re.compile(rb"PK\x05\x06.{16}\x00\x00", re.DOTALL)
_LENGTH = struct.Struct("<H")
_COMMENT = re.compile(rb"sha256:([0-9a-f]{64})")
COMMENT_BYTES = 71
_CHUNK = 1 << 20


class DamagedError(Exception):
    """The content of a file is not what was written."""


def hashed_file(content: memoryview) -> list[memoryview | bytes]:
    """Returns the parts of a file: an archive of torch.save with its hash.

    Args:
        content: The archive.
    """
    assert content[-_LENGTH.size :] == bytes(_LENGTH.size), "the archive has a comment"
    comment = b"sha256:" + hashlib.sha256(content).hexdigest().encode()
    return [content[: -_LENGTH.size], _LENGTH.pack(len(comment)) + comment]


def size_of(file: IO[bytes]) -> int:
    """Returns the number of bytes of a file, on the disk or in memory."""
    return file.seek(0, os.SEEK_END)


def find_comment(file: IO[bytes]) -> int:
    """Returns the length of the comment with the hash, or 0 if the file has none."""
    file.seek(max(0, size_of(file) - COMMENT_BYTES))
    return COMMENT_BYTES if _COMMENT.fullmatch(file.read()) else 0


def verify_hash(file: IO[bytes]) -> str | None:
    """Verifies the hash of a file.

    Returns:
        The hash, or None if the file has none. A checkpoint of a stock Trainer has none.

    Raises:
        DamagedError: The hash differs, or the file has neither a hash nor the end of an archive.
    """
    size = size_of(file)
    if not find_comment(file):
        file.seek(max(0, size - 22))
        if not _END.fullmatch(file.read()):
            raise DamagedError("it does not end as an archive of torch.save does")
        return None
    left = size - COMMENT_BYTES - _LENGTH.size
    digest = hashlib.sha256()
    file.seek(0)
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    length, written = file.read(_LENGTH.size), file.read().removeprefix(b"sha256:").decode()
    digest.update(bytes(_LENGTH.size))
    if length != _LENGTH.pack(COMMENT_BYTES) or digest.hexdigest() != written:
        raise DamagedError(f"its content has the SHA-256 {digest.hexdigest()[:16]}…, but {written[:16]}… was written")
    return written
