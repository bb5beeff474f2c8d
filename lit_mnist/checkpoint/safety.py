"""Checks a file of torch.save before it is loaded, without importing, calling or decompressing anything in it.

torch's `weights_only` blocks code, but not everything that exhausts the memory: it accepts `bytearray(10**12)`, a
tensor of a thousand bytes that claims a terabyte, and a storage that claims to be longer than its record. What
torch.save writes needs few opcodes, few globals and no compression.
"""

from __future__ import annotations

import os
import struct
import zipfile
from typing import IO

from lit_mnist.checkpoint.file_hash import find_comment, size_of
from lit_mnist.checkpoint.placeholders import UnsafeError
from lit_mnist.checkpoint.torch_internals import TENSOR_RECORD, VALUES_RECORD, is_harmless_record
from lit_mnist.checkpoint.unpickler import check_values

_ZIP_END, _ZIP64_END = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
_LARGEST_PICKLE = 2**26
_MOST_RECORDS = 65_000
# Tensors may share storage: all tensors together may be this many times larger than the file.
_MOST_SHARED = 4


def check_size(file: IO[bytes]) -> None:
    """Rejects a file that is larger than the memory of this machine, such as a sparse file.

    Raises:
        UnsafeError: The file is too large.
    """
    size, memory = size_of(file), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise UnsafeError(f"it has {size} bytes, more than the memory of this machine")


def check_archive(file: IO[bytes]) -> None:
    """Rejects a file that would import, call or decompress anything, or need more memory than its size.

    Raises:
        UnsafeError: The file is unsafe.
        Exception: The file is damaged, or not an archive.
    """
    size = size_of(file)
    _check_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        # torch does not compress.
        if unpacked > size:
            raise UnsafeError(f"it would unpack to {unpacked} bytes")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UnsafeError("it is compressed")
        # torch's reader ignores case.
        if len({entry.filename.lower() for entry in entries}) != len(entries):
            raise UnsafeError("it has two records with one name")
        folder = entries[0].filename.partition("/")[0] if entries else ""
        records = {entry.filename.removeprefix(f"{folder}/"): entry for entry in entries}
        for name, entry in records.items():
            if entry.filename != f"{folder}/{name}" or not is_harmless_record(name):
                raise UnsafeError(f"it holds {entry.filename!r:.100}")
        if VALUES_RECORD not in records:
            raise UnsafeError(f"it contains no {VALUES_RECORD}")
        if records[VALUES_RECORD].file_size > _LARGEST_PICKLE:
            raise UnsafeError("it holds too much beside tensors")
        content = archive.read(records[VALUES_RECORD])
    sizes = {match[1]: entry.file_size for name, entry in records.items() if (match := TENSOR_RECORD.fullmatch(name))}
    check_values(content, sizes, _MOST_SHARED * size)


def _check_end(file: IO[bytes], size: int) -> None:
    """Rejects an archive that has too many records, or that two readers may find at different offsets.

    torch counts offsets from the beginning of the file, Python from the apparent beginning of the archive.
    """
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise UnsafeError("it is not an archive of torch.save")
    hashed = find_comment(file)
    size -= hashed
    file.seek(max(0, size - _ZIP_END.size - _ZIP64_END.size))
    tail = file.read()
    tail = tail[: len(tail) - hashed]
    signature, *disks, here, count, length, offset, comment = _ZIP_END.unpack(tail[-_ZIP_END.size :])
    if signature != b"PK\5\6" or any(disks) or here != count or comment != hashed or count > _MOST_RECORDS:
        raise UnsafeError("its list of records is not at its end, or is too long")
    left = size - offset - length
    if left == len(tail):
        end64, _, _, _, _, _, *counts, length64, offset64, locator, _, place, _ = _ZIP64_END.unpack_from(tail)
        same = (end64, locator, place) == (b"PK\6\6", b"PK\6\7", offset + length)
        same = same and (*counts, length64, offset64) == (count, count, length, offset)
    else:
        same = left == _ZIP_END.size and tail[-_ZIP_END.size - 20 :][:4] != b"PK\6\7"
    if not same:
        raise UnsafeError("it holds more than one list of records")
