"""Images in the folders of Pascal VOC 2012. Every file is read and checked before the training.

Images are `JPEGImages/NAME.jpg`, masks `SegmentationClass/NAME.png`, and `ImageSets/Segmentation/train.txt` and
`val.txt` list the names. `val` is the test split, because the masks of VOC's test set are not published. The format is
described at http://host.robots.ox.ac.uk/pascal/VOC/voc2012/.
"""

from __future__ import annotations

import re
import stat
import tempfile
from collections import Counter
from pathlib import Path

from lit_mnist.errors import InputError
from segmentation.dataset import Split

FOLDER = Path("VOCdevkit/VOC2012")
LISTS, IMAGES, MASKS = Path("ImageSets/Segmentation"), Path("JPEGImages"), Path("SegmentationClass")
CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_MAX_LIST_BYTES = 10_000_000


def find_voc2012(root: Path) -> Path:
    """Returns the folder `VOC2012` in a folder.

    Raises:
        InputError: It is not there.
    """
    for folder in (root, root / FOLDER.name, root / FOLDER):
        if (folder / LISTS / "train.txt").is_file():
            return folder
    raise InputError(
        f"voc2012 is not in {root}: expected the folder {FOLDER} with {LISTS}/train.txt and val.txt, {IMAGES} and "
        f"{MASKS}. Set data.root to its location, or download it (2 GB) with --data.download true."
    )


def download_voc2012(root: Path) -> None:
    """Downloads and extracts the archive with torchvision, unless the folder is there.

    The complete folder is moved into place, so that a process that is killed leaves nothing that counts as the data.
    """
    from torchvision.datasets import VOCSegmentation

    try:
        find_voc2012(root)
    except InputError:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as partial:
            VOCSegmentation(partial, year="2012", image_set="train", download=True)
            (root / FOLDER).parent.mkdir(exist_ok=True)
            (Path(partial) / FOLDER).replace(root / FOLDER)


def read_splits(folder: Path) -> dict[str, Split]:
    """Returns the splits `train` and `val` of a folder.

    Raises:
        InputError: A list cannot be read, or does not name each image once.
    """
    return {name: _read_list(folder, name) for name in ("train", "val")}


def _read_list(folder: Path, split: str) -> Split:
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
    return Split(tuple(images / f"{name}.jpg" for name in names), tuple(masks / f"{name}.png" for name in names))
