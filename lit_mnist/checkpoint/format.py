"""The checkpoint format of all engines and modules: written atomically, verified by a hash, loaded without code.

The file is one of torch.save that torch and Lightning can load. Its hash is in the comment of the archive; see
`file_hash.py`. A run adds the entry `lit_mnist`: the format, the resolved configuration and what a resume needs. A
checkpoint of a stock `Trainer.save_checkpoint` has neither: it can be evaluated but not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_mnist.checkpoint import earlier
from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.checkpoint.file_hash import DamagedError, hashed_file, verify_hash
from lit_mnist.checkpoint.path import require_checkpoint
from lit_mnist.checkpoint.placeholders import UnsafeError
from lit_mnist.checkpoint.safety import check_archive, check_size
from lit_mnist.checkpoint.serialization import plain_values, serialize
from lit_mnist.errors import InputError

FORMAT = 3
SECTION = "lit_mnist"
LAST, BEST = "last.ckpt", "best.ckpt"


class Verified(NamedTuple):
    """What a file contains, and its SHA-256; None if it has none and was not verified."""

    content: dict[str, Any]
    sha256: str | None


def write_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes a checkpoint of nested plain values and tensors atomically.

    Args:
        path: The file; its folder must exist.
        checkpoint: The content.

    Raises:
        InputError: The file cannot be written, or could not be loaded again; the old file remains.
    """
    write_serialized(path, serialize(plain_values(checkpoint)))


def write_serialized(path: Path, content: memoryview) -> None:
    """Writes a checkpoint with its hash atomically.

    Args:
        path: The file; its folder must exist.
        content: The bytes of `serialize`.

    Raises:
        InputError: The file cannot be written; the old file remains.
    """
    try:
        with atomic_file(path) as file:
            file.writelines(hashed_file(content))
    except OSError as error:
        raise InputError(
            f"The checkpoint {path} cannot be written: {error.strerror}. The file that was there remains."
        ) from error


def read_checkpoint(path: Path, *, hashed: bool = True, map_location: Any = "cpu") -> dict[str, Any]:
    """Returns the content of a checkpoint; see `read_verified`."""
    return read_verified(path, hashed=hashed, map_location=map_location).content


def read_verified(path: Path, *, hashed: bool = True, map_location: Any = "cpu") -> Verified:
    """Reads and verifies a checkpoint. Nothing in it is executed or imported.

    Args:
        path: The file.
        hashed: Whether a SHA-256 is required. A checkpoint of a stock `Trainer.save_checkpoint` has none.
        map_location: As of `torch.load`.

    Raises:
        InputError: The file is missing, unreadable, damaged, or not a checkpoint.
    """
    if not path.is_file():
        raise InputError(f"There is no checkpoint at {path}: name a run folder or a .ckpt file.")
    try:
        found = _load(path, map_location)
    except UnsafeError as error:
        advice = " If you trust the file, allow them with torch.serialization.add_safe_globals." * error.names
        raise InputError(f"{path} cannot be loaded: {error}.{advice}") from error
    except DamagedError as error:
        raise InputError(f"{path} is damaged: {error}. Use another checkpoint of the run.") from error
    except PermissionError as error:
        raise InputError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error
    except Exception as error:
        raise InputError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__}): use another checkpoint of the run."
        ) from error
    if not isinstance(found.content, dict):
        raise InputError(f"{path} is not a checkpoint: it holds a {type(found.content).__name__}.")
    if SECTION in found.content and (written := found.content[SECTION]["format"]) != FORMAT:
        raise InputError(
            f"{path} has format {str(written)[:100]}, but this version reads the formats {earlier.FORMAT} and {FORMAT}."
        )
    if hashed and found.sha256 is None:
        raise InputError(
            f"{path} was written by Trainer.save_checkpoint, without the SHA-256 and the settings that a run resumes "
            "from: evaluate it with test --ckpt, or resume it in Python with trainer.fit(..., ckpt_path=...)."
        )
    return found


def _load(path: Path, map_location: Any) -> Verified:
    with path.open("rb") as file:
        check_size(file)
        sha256 = verify_hash(file)
        check_archive(file)
        file.seek(0)
        content = torch.load(file, map_location=map_location, weights_only=True)
    if not isinstance(content, dict) or SECTION not in content:
        return Verified(content, sha256)
    section = content[SECTION]
    if not isinstance(section, dict) or type(section.get("format")) is not int:
        raise UnsafeError(f"its section {SECTION} has no format")
    if section["format"] == earlier.FORMAT:
        sha256 = earlier.verify_content(content, SECTION)
        section = {**earlier.upgrade_section(section), "format": FORMAT}
    elif section["format"] == FORMAT and sha256 is None:
        raise DamagedError("its SHA-256 is missing")
    return Verified({**content, SECTION: section}, sha256)


def find_checkpoint(place: Path, preference: tuple[str, ...]) -> Path:
    """Returns the path of a checkpoint.

    Args:
        place: A run folder, its `checkpoints` folder, or a checkpoint file.
        preference: File names to look for in a folder, in order of preference.

    Raises:
        InputError: There is no checkpoint.
    """
    if not require_checkpoint(place).is_dir():
        return place
    for folder in (place / "checkpoints", place):
        for name in preference:
            if (folder / name).is_file():
                return folder / name
    raise InputError(f"The folder {place} contains no checkpoint ({' or '.join(preference)}).")


def find_weights(place: Path, report: Callable[[str], None]) -> Path:
    """Returns the path of the checkpoint to evaluate: the best one of a run folder, otherwise the last one.

    Args:
        place: See `find_checkpoint`.
        report: Receives a message if the run folder has no best checkpoint.

    Raises:
        InputError: There is no checkpoint.
    """
    found = find_checkpoint(place, (BEST, LAST))
    if found.name == LAST and place.is_dir():
        report(f"note: {place} has no {BEST}: these are the last weights, {found}")
    return found


def find_verified_checkpoint(place: Path, warn: Callable[[str], None]) -> Path:
    """Verifies the checkpoint that `find_weights` returns, and returns its path.

    Args:
        place: See `find_checkpoint`.
        warn: Receives a message if the file is not the best of its run, or has no SHA-256.

    Raises:
        InputError: The file is missing, damaged, or not a checkpoint of this project.
    """
    path = find_weights(place, warn)
    if read_verified(path, hashed=False).sha256 is None:
        warn(f"{path} was written by a Trainer: it has no SHA-256, and was not verified.")
    return path
