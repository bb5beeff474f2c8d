"""Starts the ranks of this machine, watches them, and raises the error of the failed rank.

On Linux torch's elastic agent forks the ranks from this process, which has parsed the arguments and loaded the data:
the ranks start at once and share the data. Before the fork this process must not run a parallel torch operation and
must not touch a GPU. Elsewhere the ranks are spawned: each one is a new Python process that imports everything again.
"""

from __future__ import annotations

import gc
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lit_mnist.distributed.failure import convert_disk_error, exit_rank, find_first_failure
from lit_mnist.distributed.private_folder import PrivateFolder, private_folder, run_id
from lit_mnist.distributed.rank import Rank, die_with_parent
from lit_mnist.distributed.rank_status import LAUNCHER_FOLDER, RANK_STATUS, STATUS_FILE, StatusFile
from lit_mnist.distributed.rendezvous import use_file_rendezvous, use_loopback
from lit_mnist.distributed.signals import SECONDS_TO_STOP, STOP, STOPPING, require_main_thread
from lit_mnist.distributed.terminal import print_error
from lit_mnist.distributed.torch_internals import FailedAttempt, RankAgent
from lit_mnist.errors import LitMnistError, StoppedError

Work = Callable[[Rank], None]

_START_METHOD = "fork" if platform.system() == "Linux" else "spawn"
_NO_RESTART_EXIT_CODES = (2, 4, *(128 + signum for signum in STOPPING))
_SECONDS_BETWEEN_CHECKS = 0.05


def launch(
    work: Work,
    *,
    world_size: int,
    max_restarts: int,
    logs: Path,
    start_method: str | None = None,
    frozen: bool = False,
) -> None:
    """Runs `work` in `world_size` processes of this machine, and returns when all have succeeded.

    Args:
        work: The work of each rank.
        world_size: Number of ranks.
        max_restarts: Maximum number of restarts after a worker failure.
        logs: Folder of the logs.
        start_method: `fork` (the default on Linux) or `spawn`, which requires a picklable `work`.
        frozen: Whether `gc.freeze` was called and stays in effect. Otherwise Python counts the frozen objects, which
            takes 60 ms after the imports of a run.

    Raises:
        InputError: The calling thread is not the main thread.
        LitMnistError: A rank failed; the message names the rank and the cause.
    """
    require_main_thread()
    use_loopback()
    logs.mkdir(parents=True, exist_ok=True)
    failures: list[LitMnistError] = []
    with (
        # In the run folder, so that the next start finds and removes what a killed launcher has left.
        tempfile.TemporaryDirectory(prefix=LAUNCHER_FOLDER, dir=logs.absolute(), ignore_cleanup_errors=True) as folder,
        closing(StatusFile(status_path := Path(folder) / STATUS_FILE, world_size)) as status_file,
        private_folder() as private,
        # A notebook keeps its own handlers: an interrupted cell must not end the kernel.
        STOP.listening(),
    ):

        def on_failure(attempt: FailedAttempt, restarting: bool) -> None:
            failures.append(find_first_failure(attempt, status_file))
            status_file.clear()
            if restarting:
                print_error(f"{failures[-1]}\nRestarting all ranks.")

        spec = WorkerSpec(
            role="rank",
            local_world_size=world_size,
            entrypoint=_run_rank,
            args=(work, logs, status_path, private),
            rdzv_handler=_LocalRendezvous(),
            max_restarts=max_restarts,
            monitor_interval=_SECONDS_BETWEEN_CHECKS,
        )
        agent = RankAgent(
            spec,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            start_method=start_method or _START_METHOD,
            private=private.path,
            no_restart_exit_codes=_NO_RESTART_EXIT_CODES,
            on_failure=on_failure,
            while_running=_SignalForwarder(),
        )
        with _frozen_objects(frozen):
            result = agent.run()
    if result.is_failed():
        failures[-1].step = max(failure.step for failure in failures)
        raise failures[-1]


@contextmanager
def _frozen_objects(were_frozen: bool) -> Iterator[None]:
    """Excludes the objects of this process from the garbage collection of the ranks that are forked in the body.

    A full collection visits all objects of the imported modules, which takes a third of a second, and copies the memory
    pages that the ranks share with this process.
    """
    # A program that launches ranks may have frozen its own objects.
    were_frozen = were_frozen or gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not were_frozen:
            gc.unfreeze()


class _LocalRendezvous(RendezvousHandler):
    """The rendezvous handler of torch's agent for ranks of one machine.

    torch's own handlers open a store that listens on every interface, and unpickle what they find in it. The ranks find
    each other through `use_file_rendezvous`.
    """

    @property
    def use_agent_store(self) -> bool:
        # No rank opens a store, which would listen.
        return True

    def get_backend(self) -> str:
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        # Some libraries read the master's address and port even if nothing listens there.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: the store ends with this process."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return run_id()

    def shutdown(self) -> bool:
        return True


class _SignalForwarder:
    """Forwards a signal of the launcher to its ranks once, and kills the ranks that do not end in time."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, pids: Iterable[int]) -> None:
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


def _run_rank(work: Work, logs: Path, status_path: Path, private: PrivateFolder) -> None:
    """Runs `work` in the process of a rank. After an error the process exits at once.

    Other ranks may be waiting for this one in a collective, and only its exit frees them.
    """
    die_with_parent(private.launcher)
    private.enter()
    use_file_rendezvous(private.path)
    rank = Rank.from_environment()
    RANK_STATUS.open(rank, logs, StatusFile(status_path))
    STOP.listen(lambda signum: exit_rank(StoppedError(f"Stopped by {signum.name}.", signum)))
    try:
        work(rank)
    except BaseException as error:
        exit_rank(convert_disk_error(error))
    # The work is done. torch's agent waits forever for a rank that ends while it waits for the others.
    STOP.ignore()
