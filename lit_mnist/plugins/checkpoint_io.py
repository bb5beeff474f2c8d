"""Checkpoint files that are whole or not there, verified, and that execute nothing."""

import hashlib
import io
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

from lit_mnist.errors import InputError

# A file of torch.save is a zip archive, which ends with a record of 22 bytes and a comment, whose length is the
# record's last field. The digest is the comment: every reader accepts the file, and the digest travels with it.
_END, _NO_COMMENT = b"PK\x05\x06", b"\x00\x00"
_LABEL = b"sha256:"
_COMMENT_LENGTH = len(_LABEL) + 64


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Writes a file that `torch.load(path, weights_only=True)` reads, with its SHA-256 as the comment of the archive.

    It is written to `PATH.tmp`, flushed to the disk and renamed. A process that is killed meanwhile leaves the earlier
    file as it was.

    Raises:
        InputError: `torch.load` would not load a value with `weights_only=True`, or the file cannot be written, for
            example on a full disk. The earlier file is unchanged.
    """
    path = Path(path)
    content = _with_digest(_serialize(checkpoint))
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InputError(
            f"{path} cannot be written: {error}. An earlier file of this name is unchanged; free space or permit "
            "writing, and resume from it."
        ) from error


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Reads a checkpoint, and verifies its SHA-256 if it has one; a file of `torch.save` has none.

    Nothing in the file is executed: it is always loaded with `weights_only=True`.

    Raises:
        InputError: The file is missing, damaged, or not a checkpoint, or contains other objects than tensors and plain
            values.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not (content[-22:-18] == _END and content.endswith(_NO_COMMENT)):
        signed, digest = content[:-64], content[-64:]
        if not signed.endswith(_LABEL) or hashlib.sha256(signed).hexdigest().encode() != digest:
            raise InputError(f"{path} is damaged or not a checkpoint. Resume from another one.")
    try:
        return dict(torch.load(io.BytesIO(content), map_location, weights_only=True))
    except Exception as error:  # torch raises errors of many kinds for a file that it cannot read
        with suppress(Exception):
            if names := get_unsafe_globals_in_checkpoint(io.BytesIO(content)):
                raise InputError(
                    f"{path} contains {', '.join(sorted(names))}, which could execute code, so it is not loaded. "
                    "Resume from a checkpoint of tensors and plain values."
                ) from None
        raise InputError(f"{path} is damaged or not a checkpoint. Resume from another one.") from error


class VerifiedCheckpointIO(CheckpointIO):
    """Writes checkpoints of a Trainer that are whole or not there, and verifies them when they are loaded.

    A Trainer renames its file before the disk has its content, so that a crash of the machine can leave an empty
    checkpoint in the place of the last valid one. It loads a damaged file as far as its format permits, with wrong
    weights, and it saves objects that it cannot load with `weights_only=True`, which is noticed when they are needed:

        trainer = Trainer(plugins=[VerifiedCheckpointIO()])
        trainer.fit(module, ckpt_path="last.ckpt")

    The files are loaded by every Trainer, `load_from_checkpoint` and `torch.load`. Files of other Trainers are loaded,
    without verification. Paths are those of a local or mounted file system.

    Raises:
        InputError: See `write_checkpoint` and `read_checkpoint`.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint; rank 0 calls this."""
        write_checkpoint(checkpoint, path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: str | torch.device | Callable[..., Any] | None = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns a verified checkpoint; every rank calls this. `weights_only` is always True."""
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint."""
        Path(path).unlink(missing_ok=True)


def _serialize(checkpoint: dict[str, Any]) -> bytearray:
    buffer = io.BytesIO()
    try:
        torch.save(checkpoint, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(f"The checkpoint has a value that cannot be saved: {error}. {_fix(checkpoint)}") from error
    buffer.seek(0)
    if names := get_unsafe_globals_in_checkpoint(buffer):
        raise InputError(
            f"The checkpoint has values of {', '.join(sorted(names))}, which cannot be loaded without executing code. "
            f"{_fix(checkpoint)}"
        )
    return bytearray(buffer.getbuffer())


def _fix(checkpoint: dict[str, Any]) -> str:
    def is_plain(value: Any) -> bool:
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
        except (pickle.PicklingError, AttributeError, TypeError):
            return False
        buffer.seek(0)
        return not get_unsafe_globals_in_checkpoint(buffer)

    places = ", ".join(repr(key) for key, value in checkpoint.items() if not is_plain(value))
    return (
        f"Make them tensors, numbers, strings, or lists or dictionaries of these, under {places}. "
        "save_hyperparameters(ignore=[...]) leaves out an argument of a module."
    )


def _with_digest(content: bytearray) -> bytearray:
    content[-2:] = struct.pack("<H", _COMMENT_LENGTH)
    content += _LABEL
    content += hashlib.sha256(content).hexdigest().encode()
    return content
