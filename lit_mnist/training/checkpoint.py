"""Checkpoints: one format for all engines, written whole, verified by a hash on load, never executing anything.

The file is a Lightning checkpoint (`state_dict` with the prefix `net.`, optimizer, schedule, scaler, loops) and has
one more entry, `lit_mnist`: the format's number, the experiment as plain values, the data set's digest, and the
SHA-256 of everything else in the file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_mnist.errors import InputError
from lit_mnist.training.digest import content_sha256
from lit_mnist.training.files import whole_file

FORMAT = 2
SECTION = "lit_mnist"
LAST, BEST = "last.ckpt", "best.ckpt"


def write_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes a checkpoint so that at every moment the file is the old or the new one, and sound.

    Args:
        path: Where to write; the folder must exist.
        checkpoint: Nested plain values and tensors, with a `lit_mnist` section.

    Raises:
        InputError: It cannot be written; what was at `path` is still there.
    """
    content = {**checkpoint, SECTION: {key: value for key, value in checkpoint[SECTION].items() if key != "sha256"}}
    section = {**content[SECTION], "sha256": content_sha256(content)}
    try:
        with whole_file(path) as file:
            torch.save({**content, SECTION: section}, file)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where the disk is full
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise InputError(f"The checkpoint {path} cannot be written: {reason}.") from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU and verifies it.

    Raises:
        InputError: The file is missing, unreadable, damaged, or not a checkpoint of this project.
    """
    if path.is_dir() or not path.exists():
        raise InputError(f"There is no checkpoint at {path}: name a run folder or a .ckpt file.")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        # torch stores without compression: what unpacks to more than the file's size was made to fill the memory.
        if size > path.stat().st_size:
            raise InputError(f"{path} is not a checkpoint of this project: it would unpack to {size} bytes.")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except InputError:
        raise
    except PermissionError as error:
        raise InputError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error
    except Exception as error:
        raise InputError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__}): use another checkpoint of the run."
        ) from error
    return _verified(path, checkpoint)


def _verified(path: Path, checkpoint: object) -> dict[str, Any]:
    section = checkpoint.get(SECTION) if isinstance(checkpoint, dict) else None
    if not isinstance(checkpoint, dict) or not isinstance(section, dict) or "sha256" not in section:
        raise InputError(f"{path} is not a checkpoint of this project: it has no {SECTION} section.")
    content = {**checkpoint, SECTION: {key: value for key, value in section.items() if key != "sha256"}}
    try:
        found = content_sha256(content)
    except TypeError as error:
        raise InputError(f"{path} is not a checkpoint of this project: {error}.") from error
    if found != section["sha256"]:
        raise InputError(
            f"{path} is damaged: its content has the SHA-256 {found[:16]}…, but {str(section['sha256'])[:16]}… was "
            "written. Use another checkpoint of the run."
        )
    if section.get("format") != FORMAT:
        raise InputError(f"{path} has format {section.get('format')}, but this version reads format {FORMAT}.")
    return checkpoint


def find_checkpoint(place: Path, preference: tuple[str, ...]) -> Path:
    """Returns the checkpoint that a run folder or a path means.

    Args:
        place: A run folder, its `checkpoints` folder, or a checkpoint file.
        preference: File names to look for in a folder, the preferred first.

    Raises:
        InputError: Nothing is there.
    """
    if not place.is_dir():
        if not place.exists():
            raise InputError(f"There is no run folder or checkpoint at {place}.")
        return place
    for folder in (place / "checkpoints", place):
        for name in preference:
            if (folder / name).is_file():
                return folder / name
    raise InputError(f"The folder {place} holds no checkpoint ({' or '.join(preference)}).")
