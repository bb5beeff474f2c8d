"""What one process did, as events and tensors that the checks read after the run."""

import hashlib
import json
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from ddp_doctor.records.spec import PACKAGE
from ddp_doctor.torch_internals import without_modes

# An event is attributed to the innermost frame outside of these.
_LIBRARIES = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    # A virtual environment may share the packages of another one.
    *{path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}},
    PACKAGE,
)

# These events are also written as they happen: a mismatch of collectives can kill the process.
_JOURNALED = {"collective", "ddp_forward", "backward", "join"}


class Recorder:
    """The events and tensors of this process.

    Args:
        folder: Folder for the record, `rank<R>.pt`.

    Attributes:
        events: Dictionaries of plain values: each has its `kind`, its `step` and the user's `place`.
        step: Optimizer steps so far, over all optimizers; so are `backwards` and `collectives` calls.
        rank: The rank of this process, as soon as it is known.
        active: Whether this process has taken part in training, unlike a launcher.
        predicts: Whether a Trainer predicts.
        later: Whether what follows the numbers is recorded, without tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.step = 0
        self.backwards = self.collectives = 0
        self.rank = int(os.environ.get("RANK", "0"))
        self.active = self.predicts = self.later = False
        self._lock = threading.Lock()
        self._journal: int | None = None

    def add(self, kind: str, **values: Any) -> dict[str, Any]:
        """Adds an event, with the user's file and line."""
        event = {"kind": kind, "step": self.step, "place": user_place(), **values}
        self.events.append(event)
        if kind in _JOURNALED:
            if self._journal is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._journal = os.open(self.folder / f"journal{self.rank}.jsonl", flags, 0o600)
            os.write(self._journal, (json.dumps(event, default=str) + "\n").encode())
        return event

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor into the record."""
        if not self.later:
            self.tensors[name] = own_part(tensor.detach()).clone()

    def write(self) -> None:
        """Writes what was recorded so far; another thread may call this while the process hangs."""
        with self._lock:
            target = self.folder / f"{'later' if self.later else ''}rank{self.rank}.pt"
            temporary = target.with_suffix(f".{os.getpid()}.tmp")
            with without_modes():
                save({"events": list(self.events), "tensors": dict(self.tensors)}, temporary)
            temporary.replace(target)


# The user's torch.save is replaced by a probe.
save = torch.save


# Imports of libraries call functions by the million.
@cache
def is_user_file(path: str) -> bool:
    """Returns whether a path is a file of the user, not of a library or the doctor."""
    return bool(path) and not path.startswith(("<", *(f"{folder}/" for folder in _LIBRARIES)))


def frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_frames() -> Iterator[FrameType]:
    """Yields the frames of the user's code, the innermost first."""
    return (frame for frame in frames() if is_user_file(frame.f_code.co_filename))


def user_stack() -> list[str]:
    """Returns the lines of the user's code that run, the innermost first, as `file:line`."""
    return [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in user_frames()]


def user_place() -> str:
    """Returns the innermost frame of the user's code as `file:line in function`; empty if there is none."""
    for frame in user_frames():
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def caller() -> str:
    """Returns the library's function that the user's code has called, as `file:name`; empty if there is none."""
    found = ""
    for frame in frames():
        path = frame.f_code.co_filename
        if is_user_file(path):
            return found
        if not path.startswith(PACKAGE):
            found = f"{path}:{frame.f_code.co_name}"
    return ""


def is_called_by_user() -> bool:
    """Returns whether the user's code calls the observed function itself, not through a library."""
    return is_called_near_user(0)


def is_called_near_user(most: int = 5) -> bool:
    """Returns whether the user's code calls the observed function, itself or through a few functions of a library.

    Args:
        most: Most functions between them, as those of `Accelerator.print`.
    """
    between = 0
    for frame in frames():
        if is_user_file(frame.f_code.co_filename):
            return True
        between += not frame.f_code.co_filename.startswith(PACKAGE)
        if between > most:
            break
    return False


def number_of(value: Any, known: list[Any]) -> int:
    """Returns the place of a value in a list, by its identity; a new one is appended."""
    for number, other in enumerate(known):
        if other is value:
            return number
    known.append(value)
    return len(known) - 1


def agreed(path: Path, number: int, *, late: bool) -> int:
    """Returns the number that the first late rank has written into a file, at which all ranks end together.

    Args:
        path: The file.
        number: What this rank writes.
        late: Whether this rank has run for long enough.
    """
    if late:
        with suppress(FileExistsError), path.open("x") as file:
            file.write(str(number))
    text = path.read_text() if path.exists() else ""
    return int(text or sys.maxsize)


def own_part(tensor: Any) -> torch.Tensor:
    """Returns the part of a sharded tensor that this rank holds; any other tensor as it is."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.wait() if hasattr(part, "wait") else part


def is_sharded(tensor: Any) -> bool:
    """Returns whether each rank holds a part of a tensor only."""
    return hasattr(tensor, "device_mesh") and bool(tensor.device_mesh.size() > 1)


def digest(value: Any) -> str:
    """Returns a short digest of nested tensors and plain values."""
    found = hashlib.blake2b(digest_size=8)
    _update(found, value)
    return found.hexdigest()


def _update(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = own_part(value.detach()).cpu().contiguous()
        found.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        if flat.numel():
            found.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        found.update(value.tobytes())
    elif isinstance(value, dict):
        for key in value:
            found.update(str(key).encode())
            _update(found, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            _update(found, part)
    else:
        found.update(repr(value).encode())


def sample_digests(leaves: list[Any]) -> list[str]:
    """Returns a digest per sample of a batch, whose tensors share their first dimension; empty if they do not."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        return []
    return [digest([tensor[row] for tensor in tensors]) for row in range(sizes.pop())]
