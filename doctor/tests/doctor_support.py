"""What several tests of the doctor use: paths, what is in a folder, and the processes of an examination."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from ddp_doctor.processes import children_of

ROOT = Path(__file__).parents[1]
CHILD_ENV = {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*"}


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Returns the mode, the owner, the inode, the times and the content of each entry by its path."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        stat = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = (stat.st_mode, stat.st_uid, stat.st_ino, stat.st_nlink, stat.st_mtime_ns, content)
        found[str(path.relative_to(folder))] = facts
    return found


def descendants(pid: int) -> list[int]:
    """Returns a process with all that it has started, directly or not."""
    found = [pid]
    for process in found:
        found += children_of(process)
    return found


def wait_for_end(processes: list[int]) -> None:
    """Waits until processes have ended, which a test's timeout limits."""
    while any(Path(f"/proc/{process}/exe").exists() for process in processes):
        time.sleep(0.05)
