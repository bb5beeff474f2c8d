"""Starts the ranks of this machine, watches them, and raises the error of the first failed rank.

By default torch's elastic agent forks the ranks from this process, which has imported, parsed and loaded already: they
start at once and share the data. This process therefore runs no parallel torch operation and touches no GPU before. A
spawned rank, as in most tutorials, is a new Python process, which imports everything again and receives its work
through a pipe.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from lit_mnist.distributed._private import FailedAttempt, RankAgent
from lit_mnist.distributed.failure import convert_disk_error, exit_rank, find_first_failure
from lit_mnist.distributed.private_folder import PrivateFolder, private_folder
from lit_mnist.distributed.rank import Rank, die_with_parent
from lit_mnist.distributed.rank_status import LAUNCHER_FOLDER, RANK_STATUS, STATUS_FILE, StatusFile
from lit_mnist.distributed.rendezvous import LocalRendezvous, use_file_rendezvous, use_loopback
from lit_mnist.distributed.signals import SECONDS_TO_STOP, STOP, STOPPING, require_main_thread
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import LitMnistError, StoppedError

Work = Callable[[Rank], None]

_START_METHOD = "fork" if platform.system() == "Linux" else "spawn"
_NO_RESTART_EXIT_CODES = (2, 4, *(128 + signum for signum in STOPPING))
_SECONDS_BETWEEN_CHECKS = 0.05


@dataclass(frozen=True)
class _Shared:
    """What the launcher and its ranks share.

    Attributes:
        logs: Folder of the logs.
        status_path: The status file.
        private: The private folder of the launch.
    """

    logs: Path
    status_path: Path
    private: PrivateFolder


def launch(
    work: Work,
    *,
    world_size: int,
    max_restarts: int,
    logs: Path,
    start_method: str | None = None,
) -> None:
    """Runs `work` in `world_size` processes of this machine, and returns when all have succeeded.

    Args:
        work: The work of each rank.
        world_size: Number of ranks.
        max_restarts: How often all ranks are restarted after one was lost.
        logs: Folder of the logs.
        start_method: `fork`, the default on Linux, or `spawn`; then `work` must be picklable.

    Raises:
        InputError: The calling thread is not the main one.
        LitMnistError: A rank failed; the message names it and the cause.
    """
    failures: list[LitMnistError] = []
    with _shared_files(logs, world_size) as (shared, status_file):

        def on_failure(attempt: FailedAttempt, restarting: bool) -> None:
            failures.append(find_first_failure(attempt, status_file))
            status_file.clear()
            if restarting:
                print_error(f"{failures[-1]}\nRestarting all ranks.")

        spec = WorkerSpec(
            role="rank",
            local_world_size=world_size,
            entrypoint=_run_rank,
            args=(work, shared),
            rdzv_handler=LocalRendezvous(),
            max_restarts=max_restarts,
            monitor_interval=_SECONDS_BETWEEN_CHECKS,
        )
        agent = RankAgent(
            spec,
            logs_specs=DefaultLogsSpecs(log_dir=str(shared.status_path.parent)),
            start_method=start_method or _START_METHOD,
            private=shared.private.path,
            no_restart_exit_codes=_NO_RESTART_EXIT_CODES,
            on_failure=on_failure,
            while_running=_SignalForwarder(),
        )
        result = agent.run()
    if result.is_failed():
        raise failures[-1]


@contextmanager
def _shared_files(logs: Path, world_size: int) -> Iterator[tuple[_Shared, StatusFile]]:
    """Makes what the launcher and its ranks share, and removes it at the end."""
    require_main_thread()
    use_loopback()
    logs.mkdir(parents=True, exist_ok=True)
    # In the run folder, so that the next start finds and removes what a killed launcher has left.
    folder = Path(tempfile.mkdtemp(prefix=LAUNCHER_FOLDER, dir=logs)).absolute()
    status_file = StatusFile(folder / STATUS_FILE, world_size)
    try:
        with private_folder() as private, STOP.record_only():
            yield _Shared(logs, folder / STATUS_FILE, private), status_file
    finally:
        status_file.close()
        shutil.rmtree(folder, ignore_errors=True)


class _SignalForwarder:
    """Forwards a signal of the launcher to its ranks once, and kills the ranks that do not end in time."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, pids: Iterable[int]) -> None:
        """Checks for a signal; called repeatedly while the ranks run."""
        if STOP.received_signal is None:
            return
        if self._since is None:
            self._since, signum = time.monotonic(), STOP.received_signal
        elif time.monotonic() - self._since > SECONDS_TO_STOP:
            signum = signal.SIGKILL
        else:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def _run_rank(work: Work, shared: _Shared) -> None:
    """Runs `work` in the process of a rank. After an error, it is reported and the process ends at once.

    The other ranks may wait for this one in a collective, and only its end frees them.
    """
    die_with_parent(shared.private.launcher)
    shared.private.enter()
    use_file_rendezvous(shared.private.path)
    rank = Rank.from_environment()
    RANK_STATUS.open(rank, shared.logs, StatusFile(shared.status_path))
    STOP.listen(lambda signum: exit_rank(StoppedError(f"Stopped by {signum.name}.", signum)))
    try:
        work(rank)
    except BaseException as error:
        exit_rank(convert_disk_error(error))
