"""Chooses how the runs of an examination are kept from the user's files, and removes or keeps what they wrote."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError
from ddp_doctor.files import folder_copy, kernel
from ddp_doctor.files.temporary import remove
from ddp_doctor.findings import Files
from ddp_doctor.records.run import COPY, Run
from ddp_doctor.records.spec import Spec
from ddp_doctor.remote import offline_environment

_OUTPUT = "doctor-output"
VIEW, COPIED = "private view", "copy"


@dataclass
class Protection:
    """Keeps the user's files as they are.

    Args:
        folder: Folder of the examination.
        keep_output: Whether what the runs write is kept, in a new folder.

    Attributes:
        kind: `private view` or `copy`; empty before the first run.
        not_covered: What it does not protect.
    """

    folder: Path
    keep_output: bool = False
    kind: str = ""
    not_covered: list[str] = field(default_factory=list)
    _keep: Path | None = None
    _layers: Path | None = None
    _view: dict[str, Any] = field(default_factory=dict)
    _copied: dict[Path, int] = field(default_factory=dict)
    _number: int = 0
    _name: str = ""

    def __post_init__(self) -> None:
        if self.keep_output:
            numbers = (Path.cwd() / f"{_OUTPUT}{f'-{number}' if number else ''}" for number in itertools.count())
            self._keep = next(path for path in numbers if not os.path.lexists(path))

    def begin(self, spec: Spec, make_view: Callable[[Path, Path], dict[str, Any]]) -> dict[str, Any]:
        """Returns what is added to the request for each rank of a run, and its environment.

        Args:
            spec: The run. One that resumes sees what the run before has written; others begin with the user's files.
            make_view: Makes a private view of the folder of the examination with the layers in an empty folder.

        Raises:
            InputError: The machine permits no protection, or the current folder is too large for a copy.
        """
        if not spec.continues or self._layers is None:
            self.end()
            self._name = f"{self._number}-{spec.purpose}-on-{spec.world_size}"
            self._number += 1
            if self.kind != COPIED:
                self._make_view(make_view)
            if self.kind == COPIED:
                self._make_copy()
        environment = {**offline_environment(self.folder), "TMPDIR": os.environ.get("TMPDIR", "")}
        if self.kind == VIEW:
            return {"namespaces": self._view["namespaces"], "environment": environment}
        root = self.folder / COPY
        places = {"TMPDIR": str(root.with_name("temporary")), "PWD": f"{root}{Path.cwd()}"}
        return {"copy": str(root), "environment": {**environment, **places}}

    def _make_view(self, make_view: Callable[[Path, Path], dict[str, Any]]) -> None:
        """Makes a private view, or finds out that there is to be a copy."""
        self._layers = self.folder / f"layers{self._number}"
        self._layers.mkdir()
        view = make_view(self.folder, self._layers)
        reason = view.get("error", "")
        blocked = [place for place in view.get("read_only", ()) if Path(place) in (Path.cwd() / "_").parents]
        if blocked:
            reason = f"{blocked[0]} cannot be overlaid"
        if not reason:
            self.kind, self._view = VIEW, view
            self.not_covered = [f"Files in {place} can be read, but not written." for place in view["read_only"]]
            if view["single"]:
                self.not_covered.append("Files that belong to another user or group can be read, but not written.")
            return
        remove(self._layers)
        if kernel.landlock_version() < kernel.LEAST_LANDLOCK:
            raise InputError(
                "The doctor runs nothing here, because it could not keep your files as they are: a private view of "
                f"them is not possible ({reason}), and the kernel has no Landlock (Linux 5.19). Permit one of them, "
                "such as the capability SYS_ADMIN in a container."
            )
        self.kind = COPIED
        self.not_covered = [
            f"A private view is not possible here: {reason}.",
            "What the code writes outside of the current folder is denied, except for modes and times.",
        ]

    def _make_copy(self) -> None:
        root = self.folder / COPY
        self._layers = root.parent
        root.with_name("temporary").mkdir(parents=True)
        skipped = {self.folder, *filter(None, [self._keep])}
        folder_copy.make(Path.cwd(), root, skipped)
        if self._keep is not None:
            self._copied = {path: path.lstat().st_ctime_ns for path in _files(root)}

    def end(self) -> None:
        """Keeps or removes what the runs so far have written."""
        if self._layers is None:
            return
        if self._keep is not None:
            self._copy_layers(self._keep / self._name)
        remove(self._layers)
        self._layers = None

    def files(self, runs: Iterable[Run]) -> Files:
        """Returns what the report says of it, with the other machines that the runs connected to."""
        remote = {event["address"] for run in runs for rank in run.ranks for event in rank.of_kind("remote")}
        kept = str(self._keep) if self._keep is not None and self._keep.exists() else ""
        return Files(self.kind, tuple(self.not_covered), kept, tuple(sorted(remote)))

    def _copy_layers(self, target: Path) -> None:
        if self.kind == VIEW:
            shown = Path(self._view["layers"])
            sources = [(shown / number / "files", Path(place)) for number, place in self._view["places"].items()]
        else:
            sources = [(self.folder / COPY, Path("/"))]
        for source, place in sources:
            for path in _files(source):
                with suppress(OSError):
                    # What the code has not changed is as the doctor has copied it.
                    if self._copied.get(path) != path.lstat().st_ctime_ns:
                        end = target / place.relative_to("/") / path.relative_to(source)
                        end.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(path, end, follow_symlinks=False)


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files and links in a folder, without devices: by them, the kernel marks what was removed."""
    for place, folders, names in os.walk(folder):
        paths = (Path(place, name) for name in (*folders, *names))
        yield from (path for path in paths if path.is_symlink() or path.is_file())
