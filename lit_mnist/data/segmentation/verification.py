"""Checks every file of a folder of segmentation images, and again only after a file has changed.

Decoding the 2,913 pairs of VOC takes 15 seconds or more. The user's cache therefore records the paths, sizes and
modification times of the files of each valid folder. Files that still match the record are not read again.
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
# Reading more images than this takes seconds and is announced.
_MANY = 500
# Increase with every change of the checks, so that valid folders are checked again.
_CHECKS = 1

Splits = dict[str, SegmentationSplit]


def verify(folder: Path, splits: Splits, num_classes: int) -> str:
    """Checks the files of a folder, unless the cache records that they are valid, and returns their `content_sha256`.

    Raises:
        InputError: A file is missing or damaged.
    """
    stamp = _compute_stamp(splits, num_classes)
    digest = ""
    try:
        records = _create_record_folder()
        with exclusive(records, "check data, as recorded in"):
            record = records / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"
            digest = _read_record(record, stamp)
            if not digest:
                digest = _check_all(folder, splits, num_classes)
                partial = record.with_suffix(".tmp")
                partial.write_text(json.dumps({"folder": str(folder), "stamp": stamp, "sha256": digest}))
                partial.replace(record)
    except OSError as error:
        print_error(f"note: the check of {folder} cannot be recorded ({error}): each start repeats it")
    return digest or _check_all(folder, splits, num_classes)


def _create_record_folder() -> Path:
    try:
        folder = user_cache() / "checked"
    except InputError as error:
        raise FileNotFoundError("this user has no home folder") from error
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read_record(record: Path, stamp: str) -> str:
    """Returns the digest that was recorded with a stamp, or an empty string."""
    with suppress(OSError, ValueError):
        found = json.loads(record.read_bytes())
        if isinstance(found, dict) and found.get("stamp") == stamp and isinstance(found.get("sha256"), str):
            return str(found["sha256"])
    return ""


def _iterate_pairs(splits: Splits) -> Iterator[tuple[str, Path, Path]]:
    for name, split in splits.items():
        for image, mask in zip(split.images, split.masks, strict=True):
            yield name, image, mask


def _compute_stamp(splits: Splits, num_classes: int) -> str:
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


def _check_all(folder: Path, splits: Splits, num_classes: int) -> str:
    total = sum(map(len, splits.values()))
    if total > _MANY:
        print_error(f"note: reading the {total:,} images of {folder}; this is repeated only after a file has changed")
    for _, image, mask in _iterate_pairs(splits):
        check_image(image, mask, num_classes)
    return content_sha256(splits)


def content_sha256(splits: Splits) -> str:
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
