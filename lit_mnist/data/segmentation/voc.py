"""Images in the folders of Pascal VOC 2012, each file of which is read once before it is believed.

Images are `JPEGImages/NAME.jpg`, masks `SegmentationClass/NAME.png`; `ImageSets/Segmentation/train.txt` and `val.txt`
list the names, and `val` is the test split, since VOC keeps its own test set's masks to itself. The format is described
at http://host.robots.ox.ac.uk/pascal/VOC/voc2012/.

To decode the 2,913 pairs of VOC takes 15 seconds and more. What was found sound is therefore remembered in the user's
cache, by the paths, sizes and times of change of all files: a start reads none of them again while these stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from lit_mnist.data.digits.family import user_cache
from lit_mnist.data.digits.fetch import check_allowed, exclusive
from lit_mnist.data.segmentation.images import SegmentationSplit, read_image, read_mask
from lit_mnist.data.segmentation.voc_archive import FOLDER, fetch_voc2012
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import InputError

LISTS, PICTURES, MASKS = Path("ImageSets/Segmentation"), Path("JPEGImages"), Path("SegmentationClass")
# The lists of the training and of the test split.
SPLITS = ("train", "val")
_MOST_LIST_BYTES = 10_000_000
_MOST_FILE_BYTES = 200_000_000
# Files from which on the first reading is told of: it takes seconds.
_MANY = 500
# To be changed with what is checked: what was found sound before is then read again.
_CHECKS = 1


def load_voc2012(
    root: Path | None, num_classes: int, *, download: bool, fetch: bool = True
) -> tuple[str, str, SegmentationSplit, SegmentationSplit]:
    """Loads Pascal VOC 2012, or other scenes in its folders.

    Args:
        root: The folder that holds `VOCdevkit/VOC2012`, or `VOCdevkit`, or `VOC2012` itself; without one the user's
            cache.
        num_classes: Number of classes, the border not counted.
        download: Whether the files are downloaded, once per machine, where they are missing.
        fetch: Whether that is allowed in this folder.

    Returns:
        As of `load_split`.

    Raises:
        InputError: The files are missing or cannot be fetched, or one of them is damaged.
    """
    root = root or user_cache()
    folder = find_voc2012(root)
    if folder is None and download:
        check_allowed("voc2012", root, allowed=fetch)
        fetch_voc2012(root, lambda: find_voc2012(root) is not None)
        folder = find_voc2012(root)
    if folder is None:
        raise InputError(
            f"voc2012 is not in {root}: expected is the folder {FOLDER} there, with {LISTS}/train.txt and val.txt, "
            f"{PICTURES} and {MASKS} in it. Name its place with data.root, or have it downloaded (2 GB) with "
            "--data.download true."
        )
    return load_split(folder, num_classes)


def find_voc2012(root: Path) -> Path | None:
    """Returns the folder of the scenes in a folder, or None where there is none; nothing of it is read yet.

    Raises:
        InputError: The folder cannot be looked up.
    """
    try:
        for folder in (root, root / FOLDER.name, root / FOLDER):
            if (folder / LISTS / "train.txt").is_file():
                return folder
    except OSError as error:
        raise InputError(f"{root} cannot be looked up: {error}. Name another folder with data.root.") from error
    return None


def load_split(folder: Path, num_classes: int) -> tuple[str, str, SegmentationSplit, SegmentationSplit]:
    """Loads the scenes of a folder, all of whose images and masks can be read and fit each other.

    Args:
        folder: The folder that holds `ImageSets`, `JPEGImages` and `SegmentationClass`.
        num_classes: Number of classes, the border not counted.

    Returns:
        The source: the folder, and that it was verified; the SHA-256 of its content, see `content_sha256`; the training
        and the test split.

    Raises:
        InputError: A file is missing or damaged, a image and its mask have different sizes, or a mask holds another
            class; the message names the file.
    """
    splits = {name: _listed(folder, name) for name in SPLITS}
    sha256 = _checked(folder, splits, num_classes)
    train, test = splits.values()
    return f"{folder} (every file decoded and hashed, once while sizes and times stay)", sha256, train, test


def _listed(folder: Path, split: str) -> SegmentationSplit:
    """Returns the scenes of a list."""
    path = folder / LISTS / f"{split}.txt"
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > _MOST_LIST_BYTES:
            raise InputError(f"{path}: no list of names, one a line")
        names = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no text in UTF-8") from error
    for name in names:
        if not re.fullmatch(r"\w[\w.+@-]{0,200}", name):
            raise InputError(f"{path}: {name[:100]!r} is no name of a scene: letters, digits, - and _ make one")
    if not names:
        raise InputError(f"{path}: names no scene")
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise InputError(f"{path}: names {twice} twice, and each sample counts once")
    images, masks = (folder / PICTURES, folder / MASKS)
    return SegmentationSplit(
        tuple(images / f"{name}.jpg" for name in names), tuple(masks / f"{name}.png" for name in names)
    )


def _checked(folder: Path, splits: dict[str, SegmentationSplit], num_classes: int) -> str:
    """Returns the digest of a folder's scenes, all read and found sound now or before."""
    stamp = _stamp(splits, num_classes)
    known = ""
    try:
        place = _notes()
        with exclusive(place, "check data, as noted in"):
            memory = place / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"
            known = _remembered(memory, stamp)
            if not known:
                known = _verified(folder, splits, num_classes)
                partial = memory.with_suffix(".tmp")
                partial.write_text(json.dumps({"folder": str(folder), "stamp": stamp, "sha256": known}))
                partial.replace(memory)
    except OSError as error:
        print_error(f"note: the check of {folder} cannot be remembered ({error}): each start repeats it")
    return known or _verified(folder, splits, num_classes)


def _notes() -> Path:
    """Returns the folder in which checks are remembered; an OSError says that there can be none."""
    try:
        place = user_cache() / "checked"
    except InputError as error:
        raise FileNotFoundError("this user has no home") from error
    place.mkdir(parents=True, exist_ok=True)
    return place


def _remembered(memory: Path, stamp: str) -> str:
    """Returns the digest that was noted with a stamp, or nothing."""
    with suppress(OSError, ValueError):
        found = json.loads(memory.read_bytes())
        if isinstance(found, dict) and found.get("stamp") == stamp and isinstance(found.get("sha256"), str):
            return str(found["sha256"])
    return ""


def _stamp(splits: dict[str, SegmentationSplit], num_classes: int) -> str:
    """Returns a digest of what shows that a file has changed; a missing file is refused here."""
    digest = hashlib.sha256(f"{_CHECKS} {num_classes}".encode())
    for split, scenes in splits.items():
        for image, mask in zip(scenes.images, scenes.masks, strict=True):
            for path, what in ((image, "image"), (mask, "mask")):
                try:
                    found = path.stat()
                except OSError as error:
                    raise InputError(
                        f"{path}: the {what} that {split}.txt names cannot be found ({error.strerror or error})"
                    ) from error
                if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_FILE_BYTES:
                    raise InputError(f"{path}: no {what}, but no file, or one of {found.st_size:,} bytes")
                digest.update(f"{split}/{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _verified(folder: Path, splits: dict[str, SegmentationSplit], num_classes: int) -> str:
    """Reads all scenes as the training will, and returns the digest of their files."""
    total = sum(map(len, splits.values()))
    if total > _MANY:
        print_error(f"note: reading the {total:,} scenes of {folder}, once while they stay as they are")
    for scenes in splits.values():
        for image, mask in zip(scenes.images, scenes.masks, strict=True):
            check_image(image, mask, num_classes)
    return _digest(splits)


def content_sha256(folder: Path) -> str:
    """Returns the SHA-256 over the names and contents of all files that a folder's lists name, in their order.

    Raises:
        InputError: A file is missing or cannot be read.
    """
    return _digest({name: _listed(folder, name) for name in SPLITS})


def _digest(splits: dict[str, SegmentationSplit]) -> str:
    digest = hashlib.sha256()
    for split, scenes in splits.items():
        for image, mask in zip(scenes.images, scenes.masks, strict=True):
            digest.update(f"{split}/{image.stem}\n".encode())
            for path in (image, mask):
                digest.update(_file_digest(path))
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def check_image(image: Path, mask: Path, num_classes: int) -> None:
    """Reads one scene.

    Raises:
        InputError: One of its files cannot be decoded, or they do not fit each other.
    """
    size, found = read_image(image).size, read_mask(mask, num_classes).size
    if found != size:
        raise InputError(
            f"{mask}: the mask has {found[0]} x {found[1]} pixels, but its image {image} has {size[0]} x {size[1]}"
        )
