"""Failure reports: a rank reports its error before it exits, and the launcher finds the failed rank."""

from __future__ import annotations

import dis
import errno
import logging
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

from torch.distributed import DistError

from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.distributed.rank_status import RANK_STATUS, FailureReport, StatusFile
from lit_mnist.distributed.signals import SECONDS_TO_STOP, STOP, signal_name
from lit_mnist.distributed.torch_internals import FailedAttempt, is_gloo_error, write_error_file
from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError


def is_peer_failure(error: BaseException) -> bool:
    """Returns whether an error comes from the connection to another rank, which has exited or does not respond.

    The code that raised the error decides, not the message, since a user's error may have the same message.
    """
    # An error raised while another error was handled is a consequence of that error.
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return _is_connection_error(error) and (origin is None or is_peer_failure(origin))


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, ConnectionError | TimeoutError):
        return any(frame.f_globals.get("__name__") == PeerExchange.__module__ for frame, _ in frames)
    return is_gloo_error(error) and not _is_raised_by_python(error)


def _is_raised_by_python(error: BaseException) -> bool:
    """Returns whether a `raise` statement, rather than compiled code, raised an error."""
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    return last is None or last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def convert_disk_error(error: BaseException) -> BaseException:
    """Returns an InputError for a full or read-only disk, and any other error unchanged."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        place = f" {error.filename}" if error.filename else ""
        return InputError(f"The run folder can no longer be written: {error.strerror}{place}.")
    return error


def report_failure(error: BaseException) -> FailureReport:
    """Writes an error to this rank's log, reports it to the launcher, and returns the report."""
    RANK_STATUS.clear_display()
    expected, stopped = isinstance(error, LitMnistError), isinstance(error, StoppedError)
    stack = "" if stopped else "".join(traceback.format_exception(error))
    RANK_STATUS.log(stack or str(error), logging.WARNING if stopped else logging.ERROR)
    report = FailureReport(
        message=str(error) if expected else "".join(traceback.format_exception_only(error)).strip(),
        stack=stack,
        expected=expected,
        peer_failed=RANK_STATUS.rank.world_size > 1 and is_peer_failure(error),
        late_rank=RANK_STATUS.late_rank,
        time=time.time(),
    )
    if not RANK_STATUS.write(report):
        write_error_file(report["message"], stack, report["time"])
    return report


def exit_rank(error: BaseException) -> NoReturn:
    """Reports an error and exits at once."""
    report_failure(error)
    code = error.exit_code if isinstance(error, LitMnistError) else RankLostError.exit_code
    # The disk may have no space for the output.
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


def explain_failure(report: FailureReport) -> str:
    """Returns the message for an unexpected error of this rank under an external launcher."""
    where = _describe(RANK_STATUS.rank.rank, os.getpid(), RANK_STATUS.step)
    return _explain(*where, report, report["late_rank"], "See the output of that rank or of its launcher.")


def find_first_failure(attempt: FailedAttempt, status_file: StatusFile) -> LitMnistError:
    """Returns the error of the failed rank; other ranks often fail as a consequence."""
    codes = attempt.exit_codes
    killed = {rank: -code for rank, code in codes.items() if code is not None and code < 0}
    if STOP.received_signal and signal.SIGKILL in killed.values():
        ranks = ", ".join(map(str, killed))
        message = f"Stopped by {STOP.received_signal.name}: rank {ranks} did not end within {SECONDS_TO_STOP:.0f} s."
        return StoppedError(message, STOP.received_signal)
    steps, reports = zip(*(status_file.read(rank) for rank in codes), strict=True)
    descriptions = [_describe(rank, attempt.pids[rank], steps[rank]) for rank in codes]
    if killed:
        rank, signum = next(iter(killed.items()))
        who, where = descriptions[rank]
        return RankLostError(f"{who} was killed by {signal_name(signum)}{where}.")
    written: dict[int, FailureReport] = {rank: reports[rank] for rank, code in codes.items() if code and reports[rank]}
    causes = {rank: report for rank, report in written.items() if not report["peer_failed"]}
    silent = [rank for rank, code in codes.items() if code and rank not in written]
    if silent and not causes:
        who, where = descriptions[silent[0]]
        return RankLostError(f"{who} ended with exit code {codes[silent[0]]}{where}.")
    rank, report = min((causes or written).items(), key=lambda item: item[1]["time"])
    if report["expected"]:
        error = _make_error(report["message"], codes[rank] or RankLostError.exit_code)
        error.step = steps[rank]
        return error
    # Only ranks 0 and 1 watch for late ranks, but another rank may have timed out first.
    late = next((other["late_rank"] for other in reports if other and other["late_rank"]), "")
    return RankLostError(_explain(*descriptions[rank], report, late, "No rank reports a cause."))


def _describe(rank: int, pid: int, step: int) -> tuple[str, str]:
    return f"Rank {rank} (process {pid} on {socket.gethostname()})", f" in step {step}" if step else ""


def _explain(who: str, where: str, report: FailureReport, late_rank: str, unknown: str) -> str:
    """Returns the message for an unexpected error, without its traceback only if another rank is known to be the cause.

    Args:
        who: The rank.
        where: Its step.
        report: Its report.
        late_rank: A sentence about the rank that is late; empty if there is none.
        unknown: The sentence to use if no rank is late.
    """
    stack = report["stack"].rstrip()
    if not report["peer_failed"]:
        return f"{who} failed{where}:\n{stack}"
    lost = f"{who} could not continue{where}, since another rank has exited or does not respond."
    return f"{lost} {late_rank}" if late_rank else f"{lost} {unknown}\n{stack}"


def _make_error(message: str, code: int) -> LitMnistError:
    if code > 128:
        return StoppedError(message, code - 128)
    error = InputError(message) if code == InputError.exit_code else RankLostError(message)
    error.exit_code = code
    return error
