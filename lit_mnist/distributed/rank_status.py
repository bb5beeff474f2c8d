"""The status of a rank: its log, and a file with its step and failure report that outlives its process."""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.terminal import escape_control, guard_streams, print_error

# The launcher's folder among the logs while it runs, and the status file in it.
LAUNCHER_FOLDER, STATUS_FILE = ".launcher-", "status"
_BYTES_PER_RANK = 1 << 16
_INTEGER = struct.Struct("<q")
# Characters of a traceback; in JSON a character may take six bytes.
_LONGEST_STACK = 10_000


def _shortened(stack: str) -> str:
    if len(stack) <= _LONGEST_STACK:
        return stack
    title, _, calls = stack.partition("\n")
    _, start, end = calls[-_LONGEST_STACK:].partition("\n  File ")
    return f"{title}\n  ...{start}{end}" if start else calls[-_LONGEST_STACK:]


class FailureReport(TypedDict):
    """Why a rank exits.

    Attributes:
        message: The error message.
        stack: The traceback; empty for a signal.
        expected: Whether the message is printed without a traceback.
        peer_failed: Whether the connection to another rank failed.
        late_rank: A sentence about a rank that is late; empty if there is none.
        time: Time of the error in seconds since 1970.
    """

    message: str
    stack: str
    expected: bool
    peer_failed: bool
    late_rank: str
    time: float


class StatusFile:
    """A file in which each rank of this machine writes its step and its failure report.

    The launcher allocates the space, so that a rank can write when the disk is full. The block of a rank has its step,
    the length of its report, and the report as JSON.

    Args:
        path: The file.
        ranks: Number of ranks if this process creates the file.
    """

    def __init__(self, path: Path, ranks: int = 0) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Clears the file for a restart, in the process that created it."""
        os.pwrite(self._file, bytes(_BYTES_PER_RANK * self._ranks), 0)

    def begin_step(self, local_rank: int, step: int) -> None:
        """Writes the current step of a rank, from 1."""
        os.pwrite(self._file, _INTEGER.pack(step), _BYTES_PER_RANK * local_rank)

    def write(self, local_rank: int, report: FailureReport) -> None:
        """Writes the failure report of a rank, with the first line and the end of a long traceback."""
        content = json.dumps({**report, "stack": _shortened(report["stack"])}).encode()
        if len(content) > _BYTES_PER_RANK - 2 * _INTEGER.size:
            content = json.dumps({**report, "stack": "", "message": report["message"][:1000]}).encode()
        start = _BYTES_PER_RANK * local_rank
        os.pwrite(self._file, content, start + 2 * _INTEGER.size)
        # Last, so that a reader never sees a partial report.
        os.pwrite(self._file, _INTEGER.pack(len(content)), start + _INTEGER.size)

    def read(self, local_rank: int) -> tuple[int, FailureReport | None]:
        """Returns the last step of a rank (0 for none) and its failure report."""
        content = os.pread(self._file, _BYTES_PER_RANK, _BYTES_PER_RANK * local_rank)
        if len(content) < _BYTES_PER_RANK:
            return 0, None
        (step,), (length,) = _INTEGER.unpack_from(content), _INTEGER.unpack_from(content, _INTEGER.size)
        start = 2 * _INTEGER.size
        return step, json.loads(content[start : start + length]) if length else None

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


class RankStatus:
    """The status of this process; its only instance is `RANK_STATUS`.

    Attributes:
        rank: This rank.
        step: The current step, from 1; 0 before the training.
        late_rank: A sentence about a rank that is late; empty if there is none.
        clear_display: Removes the progress bar before a message.
    """

    def __init__(self) -> None:
        self.rank = Rank()
        self.step = 0
        self.late_rank = ""
        self.clear_display: Callable[[], None] = lambda: None
        self._file: StatusFile | None = None
        self._terminal = 2
        self._has_log = False

    def open(self, rank: Rank, logs: Path, file: StatusFile | None = None) -> None:
        """Opens the log of this rank, which receives all log records and, except on rank 0, the output.

        Args:
            rank: This rank.
            logs: Folder of the logs.
            file: The status file of the launcher, if there is one.
        """
        self.rank, self._file = rank, file
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"rank-{rank.rank}.log"
        guard_streams(lambda text: self.warn(f"Rank {rank.rank} {text}"))
        self._terminal = os.dup(2)
        if not rank.is_first:
            sys.stdout.flush()
            sys.stderr.flush()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        handler = logging.FileHandler(path)
        # A full disk must not end the rank here: saving a checkpoint reports it.
        handler.handleError = lambda record: None  # type: ignore[method-assign]
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        self._has_log = True

    def begin_step(self, step: int) -> None:
        """Records the step that begins, here and in the status file."""
        self.step = step
        if self._file:
            self._file.begin_step(self.rank.local_rank, step)

    def write(self, report: FailureReport) -> bool:
        """Writes a failure report to the status file, and returns whether there is such a file."""
        if self._file:
            self._file.write(self.rank.local_rank, report)
        return self._file is not None

    def log(self, text: str, level: int = logging.ERROR) -> None:
        """Writes to the log if this rank has one."""
        if self._has_log:
            logging.getLogger(__name__).log(level, text)

    def warn(self, text: str) -> None:
        """Writes a warning to the log and to the terminal, on any rank."""
        self.log(text, logging.WARNING)
        self._write_to_terminal(f"warning: {text}")

    def print_error(self, text: str) -> None:
        """Prints an error to the terminal, on any rank."""
        if self._has_log and not self.rank.is_first:
            self._write_to_terminal(text)
        else:
            print_error(text)

    def _write_to_terminal(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._terminal, f"{escape_control(text)}\n".encode())


class _Formatter(logging.Formatter):
    # Control characters would act on a terminal that shows the log.
    def format(self, record: logging.LogRecord) -> str:
        return escape_control(super().format(record))


RANK_STATUS = RankStatus()
