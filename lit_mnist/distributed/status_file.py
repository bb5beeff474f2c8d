"""The launcher's board: a file in which each rank notes its step, and why it ends.

Its room is taken at the start, so that a rank can write to it when the disk is full, and what is on it outlives a rank
that is killed at any moment.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

# The launcher's own folder in that of the logs, for the time of the launch.
SCRATCH = ".launcher-"
# Of each rank: its step, the length of its report, and the report as JSON.
_ROOM = 1 << 16
_NUMBER = struct.Struct("<q")
# Characters of a traceback; in JSON one may take six bytes.
_LONGEST_STACK = 10_000

Report = dict[str, Any]


class StatusFile:
    """The board of the ranks of one machine.

    Args:
        path: The file.
        ranks: How many ranks to make room for; unset where it is there already.
    """

    def __init__(self, path: Path, ranks: int | None = None) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Forgets everything, for another start of the ranks; does nothing on a board that is only opened."""
        if self._ranks is not None:
            os.pwrite(self._file, bytes(_ROOM * self._ranks), 0)

    def begin_step(self, local_rank: int, step: int) -> None:
        """Notes the step that a rank is in, from 1; 0 for none."""
        os.pwrite(self._file, _NUMBER.pack(step), _ROOM * local_rank)

    def write(self, local_rank: int, report: Report) -> None:
        """Writes down why a rank ends; of a long traceback its end is kept."""
        kept = {"stack": report["stack"][-_LONGEST_STACK:]}
        content = json.dumps({**report, **kept}).encode()
        if len(content) > _ROOM - 2 * _NUMBER.size:
            content = json.dumps({**report, "stack": "", "message": report["message"][:1000]}).encode()
        os.pwrite(self._file, content, _ROOM * local_rank + 2 * _NUMBER.size)
        # Last, so that what is read is whole.
        os.pwrite(self._file, _NUMBER.pack(len(content)), _ROOM * local_rank + _NUMBER.size)

    def read(self, local_rank: int) -> tuple[int, Report | None]:
        """Returns the step that a rank is or was in, and what it has written down."""
        content = os.pread(self._file, _ROOM, _ROOM * local_rank)
        if len(content) < _ROOM:
            return 0, None
        (step,), (length,) = _NUMBER.unpack_from(content), _NUMBER.unpack_from(content, _NUMBER.size)
        start = 2 * _NUMBER.size
        return step, json.loads(content[start : start + length]) if length else None

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
