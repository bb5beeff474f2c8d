"""Starts the ranks of this machine, watches them, and says who failed and why.

The ranks are forked by torch's elastic agent from this process, which has imported, parsed and loaded already: they
start at once and share the data. The parent therefore runs no parallel torch operation and touches no GPU before.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException

from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError
from lit_mnist.ranks import Rank, die_with_parent, stay_on_loopback
from lit_mnist.rendezvous import LoopbackRendezvous
from lit_mnist.seams import NoRestartAgent

Work = Callable[[Rank], None]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_FINAL_CODES = (2, 4, 130, 143)


def launch(
    work: Work,
    *,
    world_size: int,
    timeout: float,
    max_restarts: int,
    logs: Path,
    start_method: str = "fork" if platform.system() == "Linux" else "spawn",
) -> None:
    """Runs `work` in `world_size` processes of this machine, and returns when all have ended well.

    Args:
        work: What each rank does.
        world_size: Number of ranks.
        timeout: Seconds that a rank waits for the others at the start.
        max_restarts: How often the ranks are started again when one is lost.
        logs: Folder of the ranks' logs.
        start_method: `fork`, or `spawn` where forking is not safe; then `work` must be picklable.

    Raises:
        LitMnistError: A rank ended otherwise; the message says which and why.
    """
    stay_on_loopback()
    for name in list(logging.root.manager.loggerDict):
        # What torch's agent tells of a failure is told by this module, once and in the user's terms.
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    scratch = tempfile.mkdtemp(prefix="lit_mnist-")
    failures: list[Failure] = []

    def note_failure(codes: dict[int, int | None], result: RunResult, restarting: bool) -> None:
        failure = first_failure(codes, _reports(codes, result))
        failures.append(failure)
        if restarting:
            print(f"{failure.message}\nThe ranks are started again.", file=sys.stderr, flush=True)

    spec = WorkerSpec(
        role="rank",
        local_world_size=world_size,
        entrypoint=_forked_rank,
        args=(work, logs, Path(scratch)),
        rdzv_handler=LoopbackRendezvous(f"lit_mnist-{os.getpid()}", timeout),
        max_restarts=max_restarts,
        monitor_interval=0.05,
    )
    agent = NoRestartAgent(
        spec,
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
        start_method=start_method,
        final_codes=_FINAL_CODES,
        on_failure=note_failure,
    )
    try:
        result = agent.run()
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise StoppedError(f"Stopped by {name}.", int(error.sigval)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if result.is_failed():
        raise failures[-1].as_error()


def _forked_rank(work: Work, logs: Path, scratch: Path) -> None:
    """Runs in a process of torch's agent.

    It waits until all ranks are there: the first that connects to the store makes the parent's own thread look up its
    name, and a process that is forked while a lock of that look-up is held waits for the lock for ever.
    """
    attempt = f"started-{os.environ['TORCHELASTIC_RESTART_COUNT']}-"
    (scratch / f"{attempt}{os.environ['LOCAL_RANK']}").touch()
    while len(list(scratch.glob(f"{attempt}*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.002)
    rank_main(work, logs)


def rank_main(work: Work, logs: Path) -> None:
    """Runs in each rank's process; what it raises is written down for the launcher before the process ends."""
    die_with_parent()
    # The launcher decides what a signal means: a terminal sends Ctrl-C to every process of the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_on(signal.SIGTERM)
    rank = Rank.from_environment()
    open_log(logs, rank)
    guard(work, rank)


def raise_on(*signums: signal.Signals) -> None:
    """Lets this process raise StoppedError where a signal finds it."""

    def stop(signum: int, _: object) -> NoReturn:
        raise StoppedError(f"Stopped by {signal.Signals(signum).name}.", signum)

    for signum in signums:
        signal.signal(signum, stop)


def guard(work: Work, rank: Rank) -> None:
    """Runs `work`; where it raises, notes why, and ends the process with the promised exit code.

    The process ends at once: the other ranks may wait for this one in a collective, and only its end frees them.
    """
    try:
        work(rank)
    except BaseException as error:
        end_rank(error)


def end_rank(error: BaseException) -> NoReturn:
    """Writes an error where the launcher finds it, and ends this rank's process at once."""
    report_error(error)
    code = error.exit_code if isinstance(error, LitMnistError) else RankLostError.exit_code
    sys.stdout.flush()
    os._exit(code)


def report_error(error: BaseException) -> None:
    """Writes an error into this rank's log, and where torch's launchers look for it."""
    text = "".join(traceback.format_exception(error))
    foreseen = isinstance(error, LitMnistError)
    logging.getLogger(__name__).error(text)
    message = str(error) if foreseen else "".join(traceback.format_exception_only(error)).strip()
    report = {"message": message, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    path = os.environ.get(ERROR_FILE)
    if path:
        Path(path).write_text(json.dumps({"message": report, "foreseen": foreseen, "time": time.time()}))


def open_log(logs: Path, rank: Rank) -> None:
    """Sends what this rank prints to its own log, except rank 0's, whose warnings and log records alone go there."""
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"rank-{rank.rank}.log"
    if not rank.is_first:
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


@dataclass(frozen=True)
class Failure:
    """How a group of ranks ended.

    Attributes:
        message: What is said to the user.
        code: The exit code.
    """

    message: str
    code: int

    def as_error(self) -> LitMnistError:
        """Returns the failure as the error to raise."""
        error = InputError(self.message) if self.code == InputError.exit_code else RankLostError(self.message)
        error.exit_code = self.code
        return error


_Report = dict[str, Any]


def first_failure(
    codes: dict[int, int | None], reports: dict[int, _Report | None], first: int | None = None
) -> Failure:
    """Returns the failure that came first: the others often are its consequence, such as a closed connection.

    Args:
        codes: Each rank's exit code; a negative one is a signal's number.
        reports: What the ranks wrote down before they ended.
        first: The rank that ended first, where that is known.
    """
    ended = codes if first is None else {first: codes[first]}
    killed = {rank: -code for rank, code in ended.items() if code is not None and code < 0 and -code != signal.SIGTERM}
    if killed:
        rank, signum = next(iter(killed.items()))
        return Failure(f"Rank {rank} was killed by {signal.Signals(signum).name}.", RankLostError.exit_code)
    told = {rank: report for rank, report in reports.items() if report}
    if told:
        rank, report = min(told.items(), key=lambda item: item[1]["time"])
        if report["foreseen"]:
            return Failure(report["message"]["message"], codes[rank] or RankLostError.exit_code)
        stack = report["message"]["extraInfo"]["py_callstack"]
        return Failure(f"Rank {rank} failed:\n{stack.rstrip()}", RankLostError.exit_code)
    rank, code = next((item for item in codes.items() if item[1]), (min(codes), None))
    return Failure(f"Rank {rank} ended with exit code {code}.", RankLostError.exit_code)


def _reports(codes: dict[int, int | None], result: RunResult) -> dict[int, _Report | None]:
    """Returns what the ranks of torch's agent wrote down: it tells of the file of one, and the others lie beside."""
    reports = {rank: read_report(Path(failure.error_file)) for rank, failure in result.failures.items()}
    folder = Path(next(iter(result.failures.values())).error_file).parent.parent
    for rank, code in codes.items():
        if rank not in reports and code is not None and code > 0:
            reports[rank] = read_report(folder / str(rank) / "error.json")
    return reports


def read_report(path: Path) -> _Report | None:
    """Returns what a rank wrote down before it ended, or None where it could not."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
