"""Images in the folders of Pascal VOC 2012. Every file is read and checked before the training.

Images are `JPEGImages/NAME.jpg`, masks `SegmentationClass/NAME.png`, and `ImageSets/Segmentation/train.txt` and
`val.txt` list the names. `val` is the test split, because the masks of VOC's test set are not published. The format is
described at http://host.robots.ox.ac.uk/pascal/VOC/voc2012/.
"""

from __future__ import annotations

import re
import shutil
import stat
import tarfile
from collections import Counter
from pathlib import Path, PurePosixPath

from lit_mnist.data.download import check_allowed, check_md5, fetch, is_file, locked_folder, partial_folder, user_cache
from lit_mnist.data.segmentation.split import SegmentationSplit
from lit_mnist.data.segmentation.verification import Splits, content_sha256, verify
from lit_mnist.data.torch_internals import voc2012_archive
from lit_mnist.errors import InputError

FOLDER = Path("VOCdevkit/VOC2012")
LISTS, IMAGES, MASKS = Path("ImageSets/Segmentation"), Path("JPEGImages"), Path("SegmentationClass")
_EXTRACTED = ("ImageSets", "JPEGImages", "SegmentationClass")
_MAX_LIST_BYTES = 10_000_000

Loaded = tuple[str, str, SegmentationSplit, SegmentationSplit]


def load_voc2012(root: Path | None, num_classes: int, *, download: bool, fetch_missing: bool = True) -> Loaded:
    """Loads Pascal VOC 2012, or other images in its folders; returns what `load_folder` returns.

    Args:
        root: The folder that contains `VOCdevkit/VOC2012`, or `VOCdevkit` or `VOC2012` itself; by default the user's
            cache.
        num_classes: Number of classes without the border.
        download: Whether to download the files if they are missing.
        fetch_missing: Whether a download into this folder is allowed.

    Raises:
        InputError: The files are missing, cannot be downloaded, or are damaged.
    """
    root = root or user_cache()
    folder = find_voc2012(root)
    if folder is None and download:
        check_allowed("voc2012", root, allowed=fetch_missing)
        with locked_folder(root):
            if find_voc2012(root) is None:
                _download(root)
        folder = find_voc2012(root)
    if folder is None:
        raise InputError(
            f"voc2012 is not in {root}: expected the folder {FOLDER} with {LISTS}/train.txt and val.txt, {IMAGES} and "
            f"{MASKS}. Set data.root to its location, or download it (2 GB) with --data.download true."
        )
    return load_folder(folder, num_classes)


def find_voc2012(root: Path) -> Path | None:
    """Returns the folder `VOC2012` inside a folder, or None; raises InputError if it cannot be accessed."""
    folders = (root, root / FOLDER.name, root / FOLDER)
    return next((folder for folder in folders if is_file(folder / LISTS / "train.txt")), None)


def _download(root: Path) -> None:
    """Downloads and extracts the archive, and renames the complete folder. An archive of the user is kept."""
    archive = voc2012_archive()
    path = root / archive.name
    keep = path.is_file()
    if keep:
        with path.open("rb") as file:
            check_md5(file, archive)
    else:
        fetch([archive], root)
    with partial_folder(root / ".partial") as partial:
        try:
            with tarfile.open(path) as file:
                _extract(file, partial)
        except (tarfile.TarError, EOFError) as error:
            raise InputError(f"{path} cannot be unpacked ({error}): it is not the published archive.") from error
        (root / FOLDER).parent.mkdir(exist_ok=True)
        (partial / FOLDER).replace(root / FOLDER)
    if not keep:
        path.unlink()


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Extracts the wanted files; Python before 3.11.4 cannot reject unsafe ones itself.

    Raises:
        tarfile.ExtractError: One of them is a link or a device, or would be outside of the folder.
    """
    for member in archive:
        parts = PurePosixPath(member.name).parts
        if parts[:2] != FOLDER.parts or len(parts) < 3 or parts[2] not in _EXTRACTED or member.isdir():
            continue
        source = archive.extractfile(member) if member.isreg() and ".." not in parts else None
        if source is None:
            raise tarfile.ExtractError(f"{member.name!r} is not a file within the folder")
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file)


def load_folder(folder: Path, num_classes: int) -> Loaded:
    """Loads the images of a folder, and checks that each image and its mask can be read and have the same size.

    Args:
        folder: The folder that contains `ImageSets`, `JPEGImages` and `SegmentationClass`.
        num_classes: Number of classes without the border.

    Returns:
        The source: the folder, and how it was verified; the `content_sha256`; the training and the test split.

    Raises:
        InputError: A file is missing or damaged, or does not match the others; the message names the file.
    """
    splits = _read_lists(folder)
    sha256 = verify(folder, splits, num_classes)
    train, test = splits.values()
    return f"{folder} (every file decoded and hashed, once while sizes and times stay)", sha256, train, test


def folder_sha256(folder: Path) -> str:
    """Returns the digest that `load_folder` returns, without decoding the files."""
    return content_sha256(_read_lists(folder))


def _read_lists(folder: Path) -> Splits:
    return {name: _read_list(folder, name) for name in ("train", "val")}


def _read_list(folder: Path, split: str) -> SegmentationSplit:
    path = folder / LISTS / f"{split}.txt"
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_LIST_BYTES:
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
    ((most_common, count),) = Counter(names).most_common(1)
    if count > 1:
        raise InputError(f"{path}: names {most_common} twice, and each sample counts once")
    images, masks = folder / IMAGES, folder / MASKS
    return SegmentationSplit(
        tuple(images / f"{name}.jpg" for name in names), tuple(masks / f"{name}.png" for name in names)
    )
