"""Checks every file of a folder of segmentation images, once as long as the files stay the same.

Decoding the 2,913 pairs of VOC takes 15 seconds or more. The user's cache therefore records each valid folder with the
paths, sizes and modification times of its files: as long as these stay the same, the files are not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lit_mnist.data.download import exclusive, user_cache
from lit_mnist.data.segmentation.split import SegmentationSplit, read_image, read_mask
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import InputError

_MAX_FILE_BYTES = 200_000_000
# With more images than this, reading takes seconds and is announced.
_MANY = 500
# To be increased with every change of the checks: valid folders are then checked again.
_CHECKS = 1


def _pairs(splits: dict[str, SegmentationSplit]) -> Iterator[tuple[str, Path, Path]]:
    """Yields the name of the split, the image and the mask of every sample."""
    for name, split in splits.items():
        for image, mask in zip(split.images, split.masks, strict=True):
            yield name, image, mask


def verify(folder: Path, splits: dict[str, SegmentationSplit], num_classes: int) -> str:
    """Checks the files of a folder, unless the cache records that they are valid, and returns their `content_sha256`.

    Args:
        folder: The folder.
        splits: The files of each list.
        num_classes: Number of classes without the border.

    Raises:
        InputError: A file is missing or damaged.
    """
    stamp = _stamp(splits, num_classes)
    digest = ""
    try:
        records = _records()
        with exclusive(records, "check data, as recorded in"):
            record = records / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"
            digest = _recorded(record, stamp)
            if not digest:
                digest = _verified(folder, splits, num_classes)
                partial = record.with_suffix(".tmp")
                partial.write_text(json.dumps({"folder": str(folder), "stamp": stamp, "sha256": digest}))
                partial.replace(record)
    except OSError as error:
        print_error(f"note: the check of {folder} cannot be recorded ({error}): each start repeats it")
    return digest or _verified(folder, splits, num_classes)


def _records() -> Path:
    try:
        folder = user_cache() / "checked"
    except InputError as error:
        raise FileNotFoundError("this user has no home folder") from error
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _recorded(record: Path, stamp: str) -> str:
    """Returns the digest that was recorded with a stamp, or an empty text."""
    with suppress(OSError, ValueError):
        found = json.loads(record.read_bytes())
        if isinstance(found, dict) and found.get("stamp") == stamp and isinstance(found.get("sha256"), str):
            return str(found["sha256"])
    return ""


def _stamp(splits: dict[str, SegmentationSplit], num_classes: int) -> str:
    """Returns a digest that differs if a file has changed. A missing file is an error."""
    digest = hashlib.sha256(f"{_CHECKS} {num_classes}".encode())
    for split, *files in _pairs(splits):
        for path, what in zip(files, ("image", "mask"), strict=True):
            try:
                found = path.stat()
            except OSError as error:
                raise InputError(
                    f"{path}: the {what} that {split}.txt names cannot be found ({error.strerror or error})"
                ) from error
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
                raise InputError(f"{path}: the {what} is not a regular file, or has {found.st_size:,} bytes")
            digest.update(f"{split}/{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _verified(folder: Path, splits: dict[str, SegmentationSplit], num_classes: int) -> str:
    """Decodes all files as the training does, and returns their digest."""
    total = sum(map(len, splits.values()))
    if total > _MANY:
        print_error(f"note: reading the {total:,} images of {folder}, once as long as they stay the same")
    for _, image, mask in _pairs(splits):
        check_image(image, mask, num_classes)
    return content_sha256(splits)


def content_sha256(splits: dict[str, SegmentationSplit]) -> str:
    """Returns the SHA-256 over the names and contents of all files, in the order of the lists.

    Raises:
        InputError: A file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for split, image, mask in _pairs(splits):
        digest.update(f"{split}/{image.stem}\n".encode())
        for path in (image, mask):
            try:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


def check_image(image: Path, mask: Path, num_classes: int) -> None:
    """Decodes an image and its mask.

    Raises:
        InputError: One of the files cannot be decoded, or their sizes differ.
    """
    size, found = read_image(image).size, read_mask(mask, num_classes).size
    if found != size:
        raise InputError(
            f"{mask}: the mask has {found[0]} x {found[1]} pixels, but its image {image} has {size[0]} x {size[1]}"
        )
