"""Reads the checkpoints of release 0.1, which are of two kinds.

Those of the project's own networks (format 2) have a SHA-256 over their content in the section `lit_mnist`, and their
settings under the key `experiment`. Those of a user's module have the hash of today and no section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.checkpoint.file_hash import DamagedError

FORMAT = 2


def verify_content(checkpoint: Mapping[str, Any], name: str) -> str:
    """Verifies the hash in the section of a checkpoint of format 2, and returns it.

    Args:
        checkpoint: The content of the file.
        name: The key of the section.

    Raises:
        DamagedError: The hash differs or is missing.
        TypeError: The content has more than plain values and tensors.
    """
    section = dict(checkpoint[name])
    written = str(section.pop("sha256", ""))
    found = content_sha256({**checkpoint, name: section})
    if found != written:
        raise DamagedError(f"its content has the SHA-256 {found[:16]}…, but {written[:16]}… was written")
    return written


def upgrade_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section of a checkpoint of format 2 with the names of today."""
    renamed = {"experiment": "config"}
    return {renamed.get(name, name): value for name, value in section.items() if name != "sha256"}
