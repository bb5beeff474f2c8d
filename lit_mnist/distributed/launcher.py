"""Starts the ranks of this machine, watches them, and says who failed and why.

The ranks are forked by torch's elastic agent from this process, which has imported, parsed and loaded already: they
start at once and share the data. The parent therefore runs no parallel torch operation and touches no GPU before.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from lit_mnist.distributed._private import Attempt, WatchfulAgent
from lit_mnist.distributed.addresses import stay_on_loopback
from lit_mnist.distributed.failure import RANK_STATUS, describe, end_rank, is_expected, tell
from lit_mnist.distributed.private_folder import PrivateFolder, private_folder
from lit_mnist.distributed.rank import Rank, die_with_parent
from lit_mnist.distributed.rendezvous import LocalRendezvous, use_rendezvous
from lit_mnist.distributed.signals import STOP, STOPPING, require_main_thread, signal_name
from lit_mnist.distributed.status_file import SCRATCH, StatusFile
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError

Work = Callable[[Rank], None]

BOARD = "board"
# An exit code above tells of a signal, as in a shell.
_SIGNALS = 128
_FINAL_CODES = (2, 4, *(_SIGNALS + signum for signum in STOPPING))
_SECONDS_TO_STOP = 9.0


def launch(
    work: Work,
    *,
    world_size: int,
    max_restarts: int,
    logs: Path,
    start_method: str = "fork" if platform.system() == "Linux" else "spawn",
) -> None:
    """Runs `work` in `world_size` processes of this machine, and returns when all have ended well.

    Args:
        work: What each rank does.
        world_size: Number of ranks.
        max_restarts: How often the ranks are started again when one is lost.
        logs: Folder of the ranks' logs.
        start_method: `fork`, or `spawn` where forking is not safe; then `work` must be picklable.

    Raises:
        InputError: It is called from another thread than the main one.
        LitMnistError: A rank ended otherwise; the message says which and why.
    """
    require_main_thread()
    stay_on_loopback()
    for name in list(logging.root.manager.loggerDict):
        # What torch's agent tells of a failure is told by this module, once and in the user's terms.
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Signals are the project's own affair.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    scratch = make_scratch(logs)
    board = StatusFile(scratch / BOARD, world_size)
    failures: list[LitMnistError] = []

    def record_failure(attempt: Attempt, restarting: bool) -> None:
        failure = first_failure(attempt, board)
        failures.append(failure)
        board.clear()
        if restarting:
            print_error(f"{failure}\nThe ranks are started again.")

    try:
        with private_folder() as private:
            spec = WorkerSpec(
                role="rank",
                local_world_size=world_size,
                entrypoint=rank_main,
                args=(work, logs, scratch / BOARD, private),
                rdzv_handler=LocalRendezvous(),
                max_restarts=max_restarts,
                monitor_interval=0.05,
            )
            agent = WatchfulAgent(
                spec,
                logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
                start_method=start_method,
                private=private.path,
                final_codes=_FINAL_CODES,
                on_failure=record_failure,
                while_running=Forwarder(),
            )
            with STOP.taken():
                result = agent.run()
    finally:
        board.close()
        shutil.rmtree(scratch, ignore_errors=True)
    if result.is_failed():
        raise failures[-1]


def make_scratch(logs: Path) -> Path:
    """Makes a folder for the time of the launch, in the run folder, where a next start finds what a kill has left."""
    logs.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=logs)).absolute()


class Forwarder:
    """Passes a signal that came to the launcher on to its ranks, once, and kills those that do not end in time."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, pids: Iterable[int]) -> None:
        """Looks whether a signal has come; called again and again while ranks run."""
        if STOP.received is None:
            return
        if self._since is None:
            self._since, signum = time.monotonic(), STOP.received
        elif time.monotonic() - self._since > _SECONDS_TO_STOP:
            signum = signal.SIGKILL
        else:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def rank_main(work: Work, logs: Path, board: Path, private: PrivateFolder) -> None:
    """Runs in each rank's process; what it raises is written down for the launcher before the process ends.

    The process then ends at once: the other ranks may wait for it in a collective, and only its end frees them.
    """
    die_with_parent(private.launcher)
    private.enter()
    use_rendezvous(private.path)
    rank = Rank.from_environment()
    RANK_STATUS.open(rank, logs, StatusFile(board))
    STOP.listen(lambda signum: end_rank(StoppedError(f"Stopped by {signum.name}.", signum)))
    try:
        work(rank)
    except BaseException as error:
        end_rank(is_expected(error))


def first_failure(attempt: Attempt, board: StatusFile) -> LitMnistError:
    """Returns the error of the failure that came first: the others often are its consequence (a closed connection).

    Args:
        attempt: How the ranks ended.
        board: Their steps, and what they have written down.
    """
    killed = {rank: -code for rank, code in attempt.codes.items() if code is not None and code < 0}
    if STOP.received and signal.SIGKILL in killed.values():
        names = ", ".join(map(str, killed))
        told = f"Stopped by {STOP.received.name}: rank {names} did not end within {_SECONDS_TO_STOP:.0f} s."
        return _failure(told, _SIGNALS + STOP.received)
    steps, reports = zip(*(board.read(rank) for rank in attempt.codes), strict=True)
    if killed:
        rank, signum = next(iter(killed.items()))
        who, where = describe(rank, attempt.pids[rank], steps[rank])
        return _failure(f"{who} was killed by {signal_name(signum)}{where}.")
    written = {rank: reports[rank] for rank, code in attempt.codes.items() if code and reports[rank]}
    causes = {rank: report for rank, report in written.items() if not report["lost"]}
    silent = [rank for rank, code in attempt.codes.items() if code and rank not in written]
    if silent and not causes:
        who, where = describe(silent[0], attempt.pids[silent[0]], steps[silent[0]])
        return _failure(f"{who} ended with exit code {attempt.codes[silent[0]]}{where}.")
    rank, report = min((causes or written).items(), key=lambda item: item[1]["time"])
    if report["foreseen"]:
        return _failure(report["message"], attempt.codes[rank])
    who, where = describe(rank, attempt.pids[rank], steps[rank])
    # Two ranks watch; another may have been the first to give up.
    late = next((report["late"] for report in reports if report and report["late"]), "")
    lost, stack = report["lost"], report["stack"]
    return _failure(tell(who, where, lost=lost, stack=stack, late=late, otherwise="No rank tells why."))


def _failure(message: str, code: int | None = None) -> LitMnistError:
    """Returns the error to raise, with an exit code where it is not that of a lost rank."""
    if code and code > _SIGNALS:
        return StoppedError(message, code - _SIGNALS)
    error = InputError(message) if code == InputError.exit_code else RankLostError(message)
    error.exit_code = code or error.exit_code
    return error
