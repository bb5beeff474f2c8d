"""A lock of a folder of checkpoints, so that two trainings do not overwrite each other's."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lit_mnist.distributed.gather import all_gather_bytes
from lit_mnist.distributed.rank import warn_once
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import InputError, require

_HELD: set[int] = set()


def _close_in_child() -> None:
    # The workers of a dataloader outlive a killed training by seconds, and must not keep it from being resumed.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates and locks a folder within the body. The lock needs no file, and ends with the process.

    Raises:
        InputError: The folder cannot be created, or another training run has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be written: {error.strerror}.") from error
    _HELD.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        if descriptor in _HELD:
            _HELD.remove(descriptor)
            os.close(descriptor)


def lock_on_rank_0(stack: ExitStack, folder: Path, *, is_first: bool) -> None:
    """Locks a folder on rank 0 until a stack is closed; every rank must call it.

    Raises:
        InputError: The folder cannot be locked; all ranks raise it.
    """
    message = ""
    if is_first:
        try:
            stack.enter_context(locked(folder))
        except InputError as error:
            message = str(error)
    # Not empty, which cannot be sent.
    message = all_gather_bytes(f"{message}\n".encode())[0].decode().strip()
    require(not message, message)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            raise InputError(
                f"Another training run saves in {display_path(folder)} now, and each would overwrite the checkpoint of "
                "the other. Wait until it has ended, or use another folder."
            ) from error
        warn_once(f"{display_path(folder)} cannot be locked ({error.strerror}): let only one training run save there.")
