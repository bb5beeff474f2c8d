"""What a rank leaves behind for whoever asks why it ended: its log, its step, and the cause of its end."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lit_mnist.board import Board, Report
from lit_mnist.errors import InputError, LitMnistError, RankLostError
from lit_mnist.ranks import Rank

# Where torch's launchers look for the report of an error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# What a collective says that could not reach another rank, or waited for it in vain.
_OF_A_PEER = ("closed by peer", "reset by peer", "broken pipe", "timed out", "socket timeout", "remote process exited")


class Situation:
    """What this process knows of its run; the one object of it is `SITUATION`.

    Attributes:
        rank: Its rank.
        step: The step that it is in, from 1; 0 before the training.
        late: What is known of a rank that the others wait for, as a sentence; empty where none is.
    """

    def __init__(self) -> None:
        self.rank = Rank()
        self.step = 0
        self.late = ""
        self._board: Board | None = None
        self._terminal = 2

    def open(self, rank: Rank, logs: Path, board: Board | None = None) -> None:
        """Sends what this rank prints to its own log, except rank 0's, whose warnings and log records alone go there.

        Args:
            rank: This rank.
            logs: Folder of the logs.
            board: The launcher's board, where there is one.
        """
        self.rank = rank
        self._board = board
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"rank-{rank.rank}.log"
        self._terminal = os.dup(2)
        if not rank.is_first:
            sys.stdout.flush()
            sys.stderr.flush()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        handler = logging.FileHandler(path)
        # A full disk is told of once, by whoever cannot do without it.
        handler.handleError = lambda record: None  # type: ignore[method-assign]
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)

    def begin_step(self, step: int) -> None:
        """Notes the step that begins, where the launcher finds it whatever becomes of this process."""
        self.step = step
        if self._board:
            self._board.begin_step(self.rank.local_rank, step)

    def write(self, report: Report) -> None:
        """Writes down why this rank ends, on the board, or else where torch's launchers look for it."""
        path = os.environ.get(ERROR_FILE)
        if self._board:
            self._board.write(self.rank.local_rank, report)
        elif path:
            extra = {"py_callstack": report["stack"], "timestamp": str(int(report["time"]))}
            with suppress(OSError):
                Path(path).write_text(json.dumps({"message": {"message": report["message"], "extraInfo": extra}}))

    def warn(self, text: str) -> None:
        """Writes a warning to the log, and to the terminal whichever rank this is."""
        logging.getLogger(__name__).warning(text)
        os.write(self._terminal, f"warning: {text}\n".encode())


SITUATION = Situation()


def describe(rank: int, pid: int, step: int) -> tuple[str, str]:
    """Returns who a rank is and where it stands, as parts of a sentence."""
    return f"Rank {rank} (process {pid} on {socket.gethostname()})", f" in step {step}" if step else ""


def is_consequence(message: str) -> bool:
    """Returns whether an error tells of another rank that a collective could not reach, or waited for in vain."""
    return any(words in message.lower() for words in _OF_A_PEER)


def tell(who: str, where: str, *, message: str, stack: str, late: str) -> str:
    """Returns what is said to the user of an unforeseen error in a rank."""
    if is_consequence(message):
        why = late or f"That rank's own message, or its launcher's, says why ({message.partition('. ')[0]})."
        return f"{who} could not go on{where}, since another rank has ended or does not answer. {why}"
    return f"{who} failed{where}:\n{stack.rstrip()}"


def told_here(error: BaseException) -> str:
    """Returns what is said of an error in this rank, where no launcher of the project's compares it with others."""
    who, where = describe(SITUATION.rank.rank, os.getpid(), SITUATION.step)
    stack = "".join(traceback.format_exception(error))
    return tell(who, where, message=str(error), stack=stack, late=SITUATION.late)


def foreseen(error: BaseException) -> BaseException:
    """Returns an error of the disk in the user's terms, and any other as it is."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        place = f" {error.filename}" if error.filename else ""
        return InputError(f"The run folder cannot be written any more: {error.strerror}{place}.")
    return error


def write_cause(error: BaseException) -> None:
    """Writes an error into this rank's log, and where its launcher looks for it."""
    text = "".join(traceback.format_exception(error))
    expected = isinstance(error, LitMnistError)
    logging.getLogger(__name__).error(text)
    message = str(error) if expected else "".join(traceback.format_exception_only(error)).strip()
    known = {"message": message, "stack": text, "foreseen": expected, "late": SITUATION.late}
    SITUATION.write({**known, "time": time.time()})


def end_rank(error: BaseException) -> NoReturn:
    """Writes an error where the launcher finds it, and ends this rank's process at once."""
    write_cause(error)
    code = error.exit_code if isinstance(error, LitMnistError) else RankLostError.exit_code
    # What was printed may have no room on the disk.
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
