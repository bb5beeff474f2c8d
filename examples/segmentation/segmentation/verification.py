"""Checks every file of a folder of segmentation images, and again only after a file has changed.

Decoding the 2,913 pairs of VOC takes 15 seconds or more. A record beside the folder therefore has a digest of the
names, sizes and modification times of its files. Files that still match the record are not read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lit_mnist.errors import InputError
from segmentation.dataset import Split
from segmentation.images import read_image, read_mask

_MAX_FILE_BYTES = 200_000_000
# Increase with every change of the checks, so that valid folders are checked again.
_CHECKS = 1

_log = logging.getLogger(__name__)


def verify(folder: Path, splits: dict[str, Split], num_classes: int) -> str:
    """Checks the files of a folder, unless the record says that they are valid, and returns their `content_sha256`.

    Raises:
        InputError: A file is missing or damaged; the message names it.
    """
    stamp = _compute_stamp(splits, num_classes)
    record = folder.absolute().parent / f".{folder.absolute().name}.verified.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(record.read_bytes())
        if found["stamp"] == stamp:
            return str(found["sha256"])
    for _, image, mask in _iterate_pairs(splits):
        check_image(image, mask, num_classes)
    digest = content_sha256(splits)
    try:
        partial = record.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"stamp": stamp, "sha256": digest}))
        partial.replace(record)
    except OSError as error:
        _log.warning("the check of %s cannot be recorded (%s): each start repeats it", folder, error)
    return digest


def _iterate_pairs(splits: dict[str, Split]) -> Iterator[tuple[str, Path, Path]]:
    for name, split in splits.items():
        for image, mask in zip(split.images, split.masks, strict=True):
            yield name, image, mask


def _compute_stamp(splits: dict[str, Split], num_classes: int) -> str:
    digest = hashlib.sha256(f"{_CHECKS} {num_classes}".encode())
    for split, *files in _iterate_pairs(splits):
        for path, kind in zip(files, ("image", "mask"), strict=True):
            try:
                found = path.stat()
            except OSError as error:
                raise InputError(
                    f"{path}: the {kind} that {split}.txt names cannot be found ({error.strerror or error})"
                ) from error
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
                raise InputError(f"{path}: the {kind} is not a regular file, or has {found.st_size:,} bytes")
            digest.update(f"{split}/{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def content_sha256(splits: dict[str, Split]) -> str:
    """Returns the SHA-256 over the names and contents of all files, in the order of the lists."""
    digest = hashlib.sha256()
    for split, image, mask in _iterate_pairs(splits):
        digest.update(f"{split}/{image.stem}\n".encode())
        for path in (image, mask):
            try:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


def check_image(image: Path, mask: Path, num_classes: int) -> None:
    """Decodes an image and its mask; raises InputError if this fails or their sizes differ."""
    size, mask_size = read_image(image).size, read_mask(mask, num_classes).size
    if mask_size != size:
        raise InputError(
            f"{mask}: the mask has {mask_size[0]} x {mask_size[1]} pixels, but its image {image} has "
            f"{size[0]} x {size[1]}"
        )
