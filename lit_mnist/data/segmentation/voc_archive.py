"""Pascal VOC 2012 as it is published: one archive, at the address and with the MD5 that torchvision knows.

The archive is fetched and unpacked in a folder of its own, from which what is needed moves to its place in one step: a
download that was killed leaves nothing that could be taken for the whole.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lit_mnist.data.digits.fetch import Archive, exclusive, fetch
from lit_mnist.errors import InputError

FOLDER = Path("VOCdevkit/VOC2012")
_NEEDED = ("ImageSets", "JPEGImages", "SegmentationClass")


def fetch_voc2012(root: Path, is_there: Callable[[], bool]) -> None:
    """Downloads and unpacks Pascal VOC 2012, unless another process just did.

    Args:
        root: The folder that gets `VOCdevkit/VOC2012`; an archive that lies there already is not downloaded.
        is_there: Says whether the data are there; asked again once the lock is held.

    Raises:
        InputError: The archive cannot be fetched, is damaged, or cannot be unpacked.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root, "download data into"):
            if is_there():
                return
            partial = root / ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                _unpack(_archive(root, partial), partial)
                (root / FOLDER).parent.mkdir(exist_ok=True)
                (partial / FOLDER).replace(root / FOLDER)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"The data cannot be kept in {root}: {error}. Name a folder that can be written to with data.root."
        ) from error


def _archive(root: Path, partial: Path) -> Path:
    """Returns the archive, which is the user's or was downloaded, with the right MD5."""
    from torchvision.datasets import voc

    published = voc.DATASET_YEAR_DICT["2012"]
    archive = Archive(published["filename"], (published["url"],), published["md5"])
    own = root / archive.name
    if not own.is_file():
        by_hand = f"Check the network, or fetch it by hand and put it, as it is, into {root}:\n  {archive.addresses[0]}"
        fetch(archive, partial, by_hand)
        return partial / archive.name
    with own.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        raise InputError(f"{own} is damaged: expected the MD5 {archive.md5}, found {found}. Delete it.")
    return own


def _unpack(path: Path, place: Path) -> None:
    def needed(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in archive:
            name = PurePosixPath(member.name)
            if name.parts[:2] == FOLDER.parts and name.parts[2:3] and name.parts[2] in _NEEDED:
                yield member

    try:
        with tarfile.open(path) as archive:
            archive.extractall(place, members=needed(archive), filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{path} cannot be unpacked ({error}): it is not the archive that is published.") from error
