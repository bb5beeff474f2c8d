"""What a rank leaves behind for whoever asks why it ended: its log, its step, and the cause of its end."""

from __future__ import annotations

import dis
import errno
import json
import logging
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError

from lit_mnist.board import Board, Report
from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError
from lit_mnist.exchange import Exchange
from lit_mnist.ranks import Rank
from lit_mnist.terminal import guard_streams, print_error, printable

# Where torch's launchers look for the report of an error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# The errors of gloo's connections begin with the place in its source where they were raised.
_RAISED_BY_GLOO = re.compile(r"\[[^\] ]*\bgloo/transport/[^\] ]*:\d+\]")


class Situation:
    """What this process knows of its run; the one object of it is `SITUATION`.

    Attributes:
        rank: Its rank.
        step: The step that it is in, from 1; 0 before the training.
        late: What is known of a rank that the others wait for, as a sentence; empty where none is.
        clear_display: Takes a bar off the terminal, which would stand in the way of a message.
    """

    def __init__(self) -> None:
        self.rank = Rank()
        self.step = 0
        self.late = ""
        self._board: Board | None = None
        self._terminal = 2
        self._has_log = False
        self.clear_display: Callable[[], None] = lambda: None

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
        guard_streams(lambda told: self.warn(f"Rank {rank.rank} {told}"))
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
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        self._has_log = True

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

    def log(self, text: str, level: int = logging.ERROR) -> None:
        """Writes to this rank's log; one that an outside launcher has started may have none."""
        if self._has_log:
            logging.getLogger(__name__).log(level, text)

    def warn(self, text: str) -> None:
        """Writes a warning to the log, and to the terminal whichever rank this is."""
        self.log(text, logging.WARNING)
        self._write_to_terminal(f"warning: {text}")

    def print_error(self, text: str) -> None:
        """Prints an error to the terminal, whichever rank this is: what the others print goes to their logs."""
        if self._has_log and not self.rank.is_first:
            self._write_to_terminal(text)
        else:
            print_error(text)

    def _write_to_terminal(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._terminal, f"{printable(text)}\n".encode())


class _Formatter(logging.Formatter):
    """Writes records that cannot control the terminal on which a log is shown."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


SITUATION = Situation()


def describe(rank: int, pid: int, step: int) -> tuple[str, str]:
    """Returns who a rank is and where it stands, as parts of a sentence."""
    return f"Rank {rank} (process {pid} on {socket.gethostname()})", f" in step {step}" if step else ""


def is_consequence(error: BaseException) -> bool:
    """Returns whether an error was raised by this rank's connection to another, which has ended or does not answer.

    The place where it was raised decides, never its words, which an error of the user's may have as well.
    """
    # An error that was being handled, such as the user's own, is the cause of those that came of it.
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return _is_of_a_connection(error) and (origin is None or is_consequence(origin))


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, ConnectionError | TimeoutError):
        return any(frame.f_globals.get("__name__") == Exchange.__module__ for frame, _ in frames)
    return type(error) is RuntimeError and _RAISED_BY_GLOO.match(str(error)) is not None and not _is_of_python(error)


def _is_of_python(error: BaseException) -> bool:
    """Returns whether a `raise` statement has raised an error, rather than a library's compiled code."""
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    return last is None or last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def tell(who: str, where: str, *, lost: bool, stack: str, late: str, otherwise: str) -> str:
    """Returns what is said to the user of an unforeseen error in a rank.

    Args:
        who: The rank.
        where: Its step.
        lost: Whether it has lost another rank, see `is_consequence`.
        stack: The error's traceback: it is left out only where another rank is known to be the cause.
        late: What is known of that other rank, as a sentence.
        otherwise: What is said where nothing is known.
    """
    if not lost:
        return f"{who} failed{where}:\n{stack.rstrip()}"
    told = f"{who} could not continue{where}, since another rank has ended or does not answer."
    return f"{told} {late}" if late else f"{told} {otherwise}\n{stack.rstrip()}"


def told_here(error: BaseException) -> str:
    """Returns what is said of an error in this rank, where no launcher of the project's compares it with others."""
    who, where = describe(SITUATION.rank.rank, os.getpid(), SITUATION.step)
    return tell(
        who,
        where,
        lost=SITUATION.rank.world_size > 1 and is_consequence(error),
        stack="".join(traceback.format_exception(error)),
        late=SITUATION.late,
        otherwise="That rank's own message, or its launcher's, says why.",
    )


def foreseen(error: BaseException) -> BaseException:
    """Returns an error of the disk in the user's terms, and any other as it is."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        place = f" {error.filename}" if error.filename else ""
        return InputError(f"The run folder cannot be written any more: {error.strerror}{place}.")
    return error


def write_cause(error: BaseException) -> None:
    """Writes an error into this rank's log, and where its launcher looks for it."""
    SITUATION.clear_display()
    expected, stopped = isinstance(error, LitMnistError), isinstance(error, StoppedError)
    text = "" if stopped else "".join(traceback.format_exception(error))
    SITUATION.log(text or str(error), logging.WARNING if stopped else logging.ERROR)
    message = str(error) if expected else "".join(traceback.format_exception_only(error)).strip()
    known = {"message": message, "stack": text, "foreseen": expected, "late": SITUATION.late}
    SITUATION.write({**known, "lost": is_consequence(error), "time": time.time()})


def end_rank(error: BaseException) -> NoReturn:
    """Writes an error where the launcher finds it, and ends this rank's process at once."""
    write_cause(error)
    code = error.exit_code if isinstance(error, LitMnistError) else RankLostError.exit_code
    # What was printed may have no room on the disk.
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
