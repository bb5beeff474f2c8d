"""Images in the folders of Pascal VOC 2012. Every file is read and checked before the training.

Images are `JPEGImages/NAME.jpg`, masks `SegmentationClass/NAME.png`, and `ImageSets/Segmentation/train.txt` and
`val.txt` list the names. `val` is the test split, because the masks of VOC's test set are not published. The format is
described at http://host.robots.ox.ac.uk/pascal/VOC/voc2012/.
"""

from __future__ import annotations

import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lit_mnist.data._private import voc2012_archive
from lit_mnist.data.download import check_allowed, check_md5, fetch, partial_folder, user_cache, writing
from lit_mnist.data.segmentation.split import SegmentationSplit
from lit_mnist.data.segmentation.verification import content_sha256, verify
from lit_mnist.errors import InputError

FOLDER = Path("VOCdevkit/VOC2012")
LISTS, IMAGES, MASKS = Path("ImageSets/Segmentation"), Path("JPEGImages"), Path("SegmentationClass")
_SPLITS = ("train", "val")
_NEEDED = ("ImageSets", "JPEGImages", "SegmentationClass")
_MAX_LIST_BYTES = 10_000_000

Loaded = tuple[str, str, SegmentationSplit, SegmentationSplit]


def load_voc2012(root: Path | None, num_classes: int, *, download: bool, fetch_missing: bool = True) -> Loaded:
    """Loads Pascal VOC 2012, or other images in its folders.

    Args:
        root: The folder that contains `VOCdevkit/VOC2012`, or `VOCdevkit` or `VOC2012` itself; by default the user's
            cache.
        num_classes: Number of classes without the border.
        download: Whether to download the files if they are missing.
        fetch_missing: Whether a download into this folder is allowed.

    Returns:
        See `load_folder`.

    Raises:
        InputError: The files are missing, cannot be fetched, or are damaged.
    """
    root = root or user_cache()
    folder = find_voc2012(root)
    if folder is None and download:
        check_allowed("voc2012", root, allowed=fetch_missing)
        with writing(root):
            if find_voc2012(root) is None:
                _download(root)
        folder = find_voc2012(root)
    if folder is None:
        raise InputError(
            f"voc2012 is not in {root}: expected is the folder {FOLDER}, with {LISTS}/train.txt and val.txt, {IMAGES} "
            f"and {MASKS} in it. Name its place with data.root, or have it downloaded (2 GB) with --data.download true."
        )
    return load_folder(folder, num_classes)


def find_voc2012(root: Path) -> Path | None:
    """Returns the folder with the images inside a folder, or None.

    Raises:
        InputError: The folder cannot be accessed.
    """
    try:
        for folder in (root, root / FOLDER.name, root / FOLDER):
            if (folder / LISTS / "train.txt").is_file():
                return folder
    except OSError as error:
        raise InputError(f"{root} cannot be accessed: {error}. Name another folder with data.root.") from error
    return None


def _download(root: Path) -> None:
    """Unpacks the published archive, downloaded unless the user has put it there, and moves it to its place at once."""
    archive = voc2012_archive()
    path = root / archive.name
    by_user = path.is_file()
    if by_user:
        with path.open("rb") as file:
            check_md5(file, archive)
    else:
        fetch([archive], root)
    with partial_folder(root / ".partial") as partial:
        try:
            with tarfile.open(path) as file:
                file.extractall(partial, members=_needed(file), filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise InputError(f"{path} cannot be unpacked ({error}): it is not the published archive.") from error
        (root / FOLDER).parent.mkdir(exist_ok=True)
        (partial / FOLDER).replace(root / FOLDER)
    if not by_user:
        path.unlink()


def _needed(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        parts = PurePosixPath(member.name).parts
        if parts[:2] == FOLDER.parts and len(parts) > 2 and parts[2] in _NEEDED:
            yield member


def load_folder(folder: Path, num_classes: int) -> Loaded:
    """Loads the images of a folder, and checks that all images and masks can be read and fit each other.

    Args:
        folder: The folder that contains `ImageSets`, `JPEGImages` and `SegmentationClass`.
        num_classes: Number of classes without the border.

    Returns:
        The source: the folder, and how it was verified; the `content_sha256`; the training and the test split.

    Raises:
        InputError: A file is missing or damaged, an image and its mask have different sizes, or a mask contains another
            class; the message names the file.
    """
    train, test = (_listed(folder, name) for name in _SPLITS)
    sha256 = verify(folder, {"train": train, "val": test}, num_classes)
    return f"{folder} (every file decoded and hashed, once while sizes and times stay)", sha256, train, test


def folder_sha256(folder: Path) -> str:
    """Returns the digest that `load_folder` returns, without decoding the files.

    Raises:
        InputError: A file is missing or cannot be read.
    """
    return content_sha256({name: _listed(folder, name) for name in _SPLITS})


def _listed(folder: Path, split: str) -> SegmentationSplit:
    """Returns the files of the images that a list names."""
    path = folder / LISTS / f"{split}.txt"
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > _MAX_LIST_BYTES:
            raise InputError(f"{path}: not a list of names, one per line")
        names = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text in UTF-8") from error
    for name in names:
        if not re.fullmatch(r"\w[\w.+@-]{0,200}", name):
            raise InputError(f"{path}: {name[:100]!r} is not a name of letters, digits, - and _")
    if not names:
        raise InputError(f"{path}: names no image")
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise InputError(f"{path}: names {twice} twice, and each sample counts once")
    images, masks = folder / IMAGES, folder / MASKS
    return SegmentationSplit(
        tuple(images / f"{name}.jpg" for name in names), tuple(masks / f"{name}.png" for name in names)
    )
