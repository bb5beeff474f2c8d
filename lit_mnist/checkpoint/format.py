"""The checkpoint format of all engines: written atomically, verified by a hash, and loaded without executing code.

The file is a Lightning checkpoint (`state_dict` with the prefix `net.`, optimizer, schedule, scaler, loops) with an
additional entry `lit_mnist`: the format version, the experiment as plain values, the digest of the data set, and the
SHA-256 of everything else in the file. A checkpoint of a stock `Trainer.save_checkpoint` has no such entry: it can be
evaluated but not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.checkpoint.file_hash import has_hash
from lit_mnist.checkpoint.safety import UnsafeError, load_checked
from lit_mnist.errors import InputError

FORMAT = 2
SECTION = "lit_mnist"
LAST, BEST = "last.ckpt", "best.ckpt"
_WRITTEN_BY_A_TRAINER = {"pytorch-lightning_version", "global_step", "state_dict", "hyper_parameters"}


def write_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes a checkpoint atomically.

    Args:
        path: The file; its folder must exist.
        checkpoint: Nested plain values and tensors, with a `lit_mnist` section.

    Raises:
        InputError: The file cannot be written; the old file remains.
    """
    content = _without_hash(plain_values(checkpoint))
    section = {**content[SECTION], "sha256": content_sha256(content)}
    try:
        with atomic_file(path) as file:
            torch.save({**content, SECTION: section}, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise InputError(f"The checkpoint {path} cannot be written: {reason}.") from error


def plain_values(value: Any, *, copy: bool = False) -> Any:
    """Converts nested values to plain dicts, lists and tuples, and copies the tensors to the CPU if `copy` is set."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value
    if isinstance(value, Mapping):
        return {key: plain_values(part, copy=copy) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_values(part, copy=copy) for part in value)
    return value


def read_checkpoint(path: Path, *, hashed: bool = True) -> dict[str, Any]:
    """Reads a checkpoint to the CPU and verifies it.

    Args:
        path: The file.
        hashed: Whether a SHA-256 is required. A checkpoint of a stock `Trainer.save_checkpoint` has none.

    Raises:
        InputError: The file is missing, unreadable, damaged, or not a checkpoint of this project.
    """
    if not path.is_file():
        raise InputError(f"There is no checkpoint at {path}: name a run folder or a .ckpt file.")
    try:
        checkpoint = load_checked(path)
    except UnsafeError as error:
        raise InputError(f"{path} is not a checkpoint of this project: {error}.") from error
    except PermissionError as error:
        raise InputError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error
    except Exception as error:
        raise InputError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__}): use another checkpoint of the run."
        ) from error
    return _verified(path, checkpoint, hashed=hashed)


def _verified(path: Path, checkpoint: object, *, hashed: bool) -> dict[str, Any]:
    section = checkpoint.get(SECTION) if isinstance(checkpoint, dict) else None
    if isinstance(checkpoint, dict) and SECTION not in checkpoint and checkpoint.keys() >= _WRITTEN_BY_A_TRAINER:
        if not hashed:
            return checkpoint
        raise InputError(
            f"{path} was written by Trainer.save_checkpoint, without the SHA-256 and the experiment that a run resumes "
            "from: evaluate it with test --ckpt, or resume it in Python with trainer.fit(..., ckpt_path=...)."
        )
    if not isinstance(checkpoint, dict) or not isinstance(section, dict) or "sha256" not in section:
        raise InputError(
            f"{path} is not a checkpoint of this project's networks: it has no {SECTION} section. The weights of your "
            "own LightningModule are loaded by its load_from_checkpoint."
        )
    try:
        found = content_sha256(_without_hash(checkpoint))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path} is not a checkpoint of this project: {error}.") from error
    if found != section["sha256"]:
        raise InputError(
            f"{path} is damaged: its content has the SHA-256 {found[:16]}…, but {str(section['sha256'])[:16]}… was "
            "written. Use another checkpoint of the run."
        )
    written = section.get("format")
    if not isinstance(written, int) or written != FORMAT:
        raise InputError(f"{path} has format {str(written)[:100]}, but this version reads format {FORMAT}.")
    return checkpoint


def _without_hash(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    section = {key: value for key, value in checkpoint[SECTION].items() if key != "sha256"}
    return {**checkpoint, SECTION: section}


def find_checkpoint(place: Path, preference: tuple[str, ...]) -> Path:
    """Returns the path of a checkpoint.

    Args:
        place: A run folder, its `checkpoints` folder, or a checkpoint file.
        preference: File names to look for in a folder, in order of preference.

    Raises:
        InputError: There is no checkpoint.
    """
    try:
        if not place.is_dir():
            if not place.exists():
                raise InputError(f"There is no run folder or checkpoint at {place}.")
            return place
    except OSError as error:
        raise InputError(f"The checkpoint {place} cannot be read: {error.strerror}.") from error
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
    if SECTION not in read_checkpoint(path, hashed=False) and not has_hash(path):
        warn(f"{path} was written by a Trainer: it has no SHA-256, and was not verified.")
    return path
