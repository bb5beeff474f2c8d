"""Chooses how the runs of an examination are kept from the user's files, and removes or keeps what they wrote."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_doctor.files import kernel
from ddp_doctor.files.redirect import LAYER, path_with_site
from ddp_doctor.files.temporary import remove
from ddp_doctor.observations import Files
from ddp_doctor.records.run import Run
from ddp_doctor.records.spec import Spec
from ddp_doctor.remote import offline_environment

_OUTPUT = "doctor-output"
VIEW, REDIRECTED = "private view", "redirected writes"


@dataclass
class Protection:
    """Keeps the user's files as they are.

    Args:
        folder: Folder of the examination.
        keep_output: Whether what the runs write is kept, in a new folder.

    Attributes:
        kind: `private view` or `redirected writes`; empty before the first run.
        not_covered: What it does not protect.
    """

    folder: Path
    keep_output: bool = False
    kind: str = ""
    not_covered: list[str] = field(default_factory=list)
    _keep: Path | None = None
    _layers: Path | None = None
    _view: dict[str, Any] = field(default_factory=dict)
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
        """
        if not spec.continues or self._layers is None:
            self._begin(spec, make_view)
        environment = {**offline_environment(self.folder), "TMPDIR": os.environ.get("TMPDIR", "")}
        if self._view:
            return {"namespaces": self._view["namespaces"], "environment": environment}
        assert self._layers is not None
        temporary = self._layers / "temporary"
        temporary.mkdir(exist_ok=True)
        places = {LAYER: str(self._layers), "TMPDIR": str(temporary), "PYTHONPATH": path_with_site()}
        return {"environment": {**environment, **places}}

    def _begin(self, spec: Spec, make_view: Callable[[Path, Path], dict[str, Any]]) -> None:
        self.end()
        self._name = f"{self._number}-{spec.purpose}-on-{spec.world_size}"
        self._layers = self.folder / f"layers{self._number}"
        self._layers.mkdir()
        self._number += 1
        if self.kind == REDIRECTED:
            return
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
        self.kind, self._view = REDIRECTED, {}
        remove(self._layers)
        self._layers.mkdir()
        self.not_covered = [f"A private view is not possible here: {reason}."]
        if kernel.landlock_version() >= kernel.LEAST_LANDLOCK:
            others = "What other programs and libraries in other languages write is denied, except for modes and times."
        else:
            others = "What other programs and libraries in other languages write reaches your files."
        self.not_covered.append(others)

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
        if self._view:
            shown = Path(self._view["layers"])
            sources = [(shown / number / "files", Path(place)) for number, place in self._view["places"].items()]
        else:
            assert self._layers is not None
            sources = [(self._layers / "files", Path("/"))]
        for source, place in sources:
            _copy(source, target / place.relative_to("/"))


def _copy(source: Path, target: Path) -> None:
    """Copies the files that a layer has, without empty folders."""
    for place, _, names in os.walk(source):
        for path in (Path(place, name) for name in names):
            # The kernel marks what was removed by a device file.
            if path.is_symlink() or path.is_file():
                end = target / path.relative_to(source)
                with suppress(OSError):
                    end.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, end, follow_symlinks=False)
