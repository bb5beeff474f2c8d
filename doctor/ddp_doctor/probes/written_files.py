"""Probe of the files that a process writes and locks."""

import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_doctor.after_import import after_import
from ddp_doctor.probes.state import StateProbe
from ddp_doctor.probes.wrap import wrap_everywhere
from ddp_doctor.records.recorder import Recorder, caller, is_called_by_user, user_place, user_stack

# A file in the folder of a run: a checkpoint with an optimizer was saved, after which an interrupted run ends.
SAVED = "saved"


class FileProbe:
    """Records the files that the user's code opens for writing, and those that it saves."""

    def __init__(self, recorder: Recorder, state: StateProbe) -> None:
        self.recorder, self._state = recorder, state
        # Files that were locked, or created exclusively.
        self._locks: set[str] = set()

    def install(self) -> None:
        """Installs the probes."""
        wrap_everywhere("save", torch.save, self._on_save)
        after_import({"safetensors.torch": self._watch_safetensors})
        sys.addaudithook(self._on_audit)

    def _watch_safetensors(self, module: Any) -> None:
        def around(original: Callable[..., Any], tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            return self._on_save(original, tensors, filename, *args, **kwargs)

        original = module.save_file
        # The second is its name in the libraries of Hugging Face.
        for name in ("save_file", "safe_save_file"):
            wrap_everywhere(name, original, around)

    def _on_save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        content: dict[str, Any] = {}
        if not self.recorder.rank or self.recorder.active:
            with suppress(Exception):
                # A value of the user may raise anything.
                if content := self._state.saved(obj):
                    self.recorder.add("saved", file=str(f)[:500], **content)
        # The names of the arguments are torch's.
        if isinstance(f, str | os.PathLike):
            path = str(Path(f).absolute())
            values = {"locks": self._held(), "rows": rows_of(obj), "stack": user_stack(), "by": caller()}
            self.recorder.add("save", path=path, **values)
        result = original(obj, f, *args, **kwargs)
        if content.get("optimizers"):
            (self.recorder.folder / SAVED).touch()
        return result

    def _on_audit(self, event: str, args: Any) -> None:
        if event in {"fcntl.flock", "fcntl.lockf"}:
            path = _path_of(args[0])
            if args[1] & fcntl.LOCK_UN:
                self._locks.discard(path)
            elif path:
                self._add_lock(path)
        if event != "open" or not isinstance(args[0], str) or not isinstance(args[2], int):
            return
        path = os.path.abspath(args[0])  # noqa: PTH100
        if args[2] & os.O_EXCL:
            self._add_lock(path)
        others = ("/dev/", "/proc/", "/sys/", str(self.recorder.folder))
        if args[2] & (os.O_WRONLY | os.O_RDWR) and not args[0].startswith(others):
            mode = args[1] if isinstance(args[1], str) else ""
            # What a library opens by itself is not the user's doing.
            if user_place() and (is_called_by_user() or not is_cached(path, os.environ)):
                self.recorder.add("open", path=path, mode=mode, locks=self._held(), by=caller())

    def _add_lock(self, path: str) -> None:
        self._locks.add(path)
        self.recorder.add("lock", path=path)

    def _held(self) -> list[str]:
        """Returns the locks that this process holds: their files are still open."""
        if not self._locks:
            return []
        return sorted(self._locks & {_path_of(int(number)) for number in os.listdir("/proc/self/fd")})  # noqa: PTH208


# Variables of the environment that name the folder of a library's cache; others have CACHE in their names.
_CACHES = ("HF_HOME", "TORCH_HOME", "MPLCONFIGDIR", "NLTK_DATA", "KERAS_HOME")
_LARGE = 20_000_000


def is_cached(path: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a file is in a cache of a library, which takes care itself that several processes share it."""
    folders = [folder for name, folder in environment.items() if name in _CACHES or "CACHE" in name.split("_")]
    folders.append(os.path.join(environment.get("HOME", "/"), ".cache"))  # noqa: PTH118
    return any(os.path.isabs(folder) and Path(path).is_relative_to(folder) for folder in folders)  # noqa: PTH117


def rows_of(content: Any, depth: int = 0) -> set[int]:
    """Returns the lengths of the tensors, arrays and lists in a nested value."""
    if isinstance(content, torch.Tensor | np.ndarray):
        return {len(content) if content.ndim else 1}
    if not isinstance(content, dict | list | tuple) or depth > 2:
        return set()
    parts = list(content.values() if isinstance(content, dict) else content)
    found = set() if isinstance(content, dict) else {len(content)}
    # The batches of a list are rows together.
    if found and all(isinstance(part, torch.Tensor) for part in parts):
        found.add(sum(len(part) if part.ndim else 1 for part in parts))
    return found.union(*(rows_of(part, depth + 1) for part in parts[:1000]))


def rows_of_file(path: Path) -> list[int]:
    """Returns the numbers of rows that a file of text has, with or without a header."""
    with suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size <= _LARGE:
            lines = len([line for line in path.read_text().splitlines() if line.strip()])
            return [lines, lines - 1]
    return []


def _path_of(descriptor: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return ""
