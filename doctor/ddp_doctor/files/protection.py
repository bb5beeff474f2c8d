"""Chooses how the runs of an examination are kept from the user's files, and removes what they wrote."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError
from ddp_doctor.files import folder_copy, kernel
from ddp_doctor.findings import Files
from ddp_doctor.records.run import COPY, Run
from ddp_doctor.records.spec import Spec
from ddp_doctor.remote import offline_environment

VIEW, COPIED = "private view", "copy"


@contextmanager
def examination_folder() -> Iterator[Path]:
    """Yields a new temporary folder, and removes it."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-doctor-")).resolve()
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Removes a folder of the doctor, also what the examined program or the kernel has made unreadable."""
    # tempfile.TemporaryDirectory changes the mode of what a link leads to, before Python 3.11.8.
    for place, folders, _files in os.walk(folder):
        for path in (Path(place, name) for name in folders):
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Protection:
    """Keeps the user's files as they are.

    Attributes:
        kind: `private view` or `copy`; empty before the first run.
        not_covered: What it does not protect.
    """

    folder: Path
    kind: str = ""
    not_covered: list[str] = field(default_factory=list)
    _written: Path | None = None
    _namespaces: list[str] = field(default_factory=list)

    def begin(self, spec: Spec, make_view: Callable[[Path, Path], dict[str, Any]]) -> dict[str, Any]:
        """Returns what is added to the request for each rank of a run, and its environment.

        Args:
            spec: The run. One that resumes sees what the run before has written; others begin with the user's files.
            make_view: Makes a private view of the folder of the examination with the layers in an empty folder.

        Raises:
            InputError: The machine permits no protection, or the current folder is too large for a copy.
        """
        if not spec.continues or self._written is None:
            self.end()
            if self.kind != COPIED:
                self._make_view(make_view)
            if self.kind == COPIED:
                self._make_copy()
        environment = {**offline_environment(self.folder), "TMPDIR": os.environ.get("TMPDIR", "")}
        if self.kind == VIEW:
            return {"namespaces": self._namespaces, "environment": environment}
        root = self.folder / COPY
        places = {"TMPDIR": str(root.with_name("temporary")), "PWD": f"{root}{Path.cwd()}"}
        return {"copy": str(root), "environment": {**environment, **places}}

    def _make_view(self, make_view: Callable[[Path, Path], dict[str, Any]]) -> None:
        """Makes a private view, or finds out that there is to be a copy."""
        self._written = Path(tempfile.mkdtemp(prefix="layers", dir=self.folder))
        view = make_view(self.folder, self._written)
        reason = view.get("error", "")
        blocked = [place for place in view.get("read_only", ()) if Path(place) in (Path.cwd() / "_").parents]
        if blocked:
            reason = f"{blocked[0]} cannot be overlaid"
        if not reason:
            self.kind, self._namespaces = VIEW, view["namespaces"]
            self.not_covered = [f"Files in {place} can be read, but not written." for place in view["read_only"]]
            if view["single"]:
                self.not_covered.append("Files that belong to another user or group can be read, but not written.")
            return
        remove(self._written)
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
        self._written = root.parent
        root.with_name("temporary").mkdir(parents=True)
        folder_copy.make(Path.cwd(), root, self.folder)

    def end(self) -> None:
        """Removes what the runs so far have written."""
        if self._written is not None:
            remove(self._written)
            self._written = None

    def files(self, runs: Iterable[Run]) -> Files:
        """Returns what the report says of it, with the other machines that the runs connected to."""
        remote = {event["address"] for run in runs for rank in run.ranks for event in rank.of_kind("remote")}
        return Files(self.kind, tuple(self.not_covered), tuple(sorted(remote)))
