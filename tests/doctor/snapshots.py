"""What exists in a folder: all that an examination must leave as it is."""

import hashlib
import os
from pathlib import Path
from typing import Any


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Returns the mode, the owner, the inode, the times and the content of each entry by its path."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        stat = path.lstat()
        content = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = (stat.st_mode, stat.st_uid, stat.st_ino, stat.st_nlink, stat.st_mtime_ns, content)
        found[str(path.relative_to(folder))] = facts
    return found
