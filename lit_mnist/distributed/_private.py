"""The places where the launcher reaches into torch's private parts.

torch's elastic agent restarts its ranks after any failure, waits half a minute for those that are left, and answers a
signal by an exception. `WatchfulAgent` keeps it from restarting where the rank's exit code says that another try would
end the same way, notes how every rank ended (torch keeps one), and ends the others at once.

torch's launchers unpickle what they find in a temporary folder: `WatchfulAgent` gives them a private one. torch has no
public way to say what a process group that is made by the environment meets in: `find_each_other_by` sets it.

A change of torch is noticed by `test_a_refusal_in_a_rank_is_never_restarted`,
`test_nothing_that_another_user_plants_in_the_temporary_folder_is_executed` and `test_nothing_listens_beyond_loopback`
in tests/distributed/test_launcher.py, and by `test_nothing_is_left_of_a_run_of_which_one_process_is_killed` in
tests/faults/test_kill.py.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.rendezvous import _rendezvous_handlers

from lit_mnist.distributed.private_folder import temporary_files_in
from lit_mnist.distributed.signals import STOP, blocked

_SECONDS_TO_END = 1
_SECONDS_TO_DIE = 10


@dataclass(frozen=True)
class Attempt:
    """How a group of ranks stood when the first failure was noticed, before the others were ended.

    Attributes:
        codes: Each rank's exit code, None where it was still running; a negative one is a signal's number.
        pids: Their processes.
    """

    codes: dict[int, int | None]
    pids: dict[int, int]


class WatchfulAgent(LocalElasticAgent):
    """torch's agent for the ranks of this machine, with the project's own way of ending them.

    It starts no rank again that ended with a final exit code, leaves signals to `STOP`, and kills what is left one
    second after a failure.

    Args:
        private: The launch's private folder, in which torch names the files that it unpickles after a failure.
        final_codes: Exit codes after which nothing is started again.
        on_failure: Called once per failed attempt, and told whether the ranks are started again.
        while_running: Called again and again with the ranks' processes.
    """

    def __init__(
        self,
        *args: Any,
        private: Path,
        final_codes: Container[int],
        on_failure: Callable[[Attempt, bool], None],
        while_running: Callable[[Iterable[int]], None],
        **kwargs: Any,
    ) -> None:
        # Seconds that ranks have to end before they are killed; older releases of torch set them by themselves.
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
            kwargs["shutdown_timeout"] = _SECONDS_TO_END
        super().__init__(*args, **kwargs)
        self._private = private
        self._final_codes = final_codes
        self._on_failure = on_failure
        self._while_running = while_running

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Blocked, so that no rank meets a signal before it listens; older releases of torch set handlers of their own.
        with blocked(), temporary_files_in(self._private):
            started = super()._start_workers(worker_group)
            STOP.register()
        context = self._pcontext._pc  # type: ignore[union-attr]
        if "grace_period" in inspect.signature(context.join).parameters:
            context.join = partial(context.join, grace_period=_SECONDS_TO_END)
        return started

    def _attempt(self, worker_group: WorkerGroup) -> Attempt:
        context = self._pcontext
        processes = context._pc.processes  # type: ignore[union-attr]
        ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        return Attempt(
            {rank: processes[local].exitcode for rank, local in ranks.items()},
            {rank: processes[local].pid for rank, local in ranks.items()},
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._while_running(self._pcontext.pids().values())  # type: ignore[union-attr]
        attempt = self._attempt(worker_group)
        codes = [code for code in attempt.codes.values() if code]
        if codes:
            # Before torch looks: it would wait half a minute for those that are left.
            end_processes(self._pcontext._pc.processes)  # type: ignore[union-attr]
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            if not codes:
                # A rank ended in between: torch has ended the others, and only its own word tells which was first.
                first = {rank: failure.exitcode for rank, failure in result.failures.items()}
                attempt = Attempt(dict.fromkeys(attempt.codes) | first, attempt.pids)
                codes = list(first.values())
            if STOP.received or any(code in self._final_codes for code in codes):
                self._remaining_restarts = 0
            self._on_failure(attempt, self._remaining_restarts > 0)
        return result


def find_each_other_by(meet: Callable[..., Iterator[tuple[dist.Store, int, int]]]) -> None:
    """Lets the process groups of this process that are made by the environment meet in a store of the caller's.

    Args:
        meet: Given a URL and a time-out, yields the store, this rank and the number of ranks.
    """
    _rendezvous_handlers["env"] = meet


def end_processes(processes: Iterable[BaseProcess]) -> None:
    """Ends processes: those that do not end by themselves within a second, such as stopped ones, are killed."""
    processes = list(processes)
    _join(processes, _SECONDS_TO_END)
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
    # One that is stuck in a GPU's driver outlives even that.
    _join(processes, _SECONDS_TO_DIE)


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
