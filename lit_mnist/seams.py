"""The places where the project reaches into a library's private parts, each with a test that notices a change.

1. torch's elastic agent restarts its ranks after any failure: `NoRestartAgent` keeps it from restarting where the
   rank's exit code says that another try would end the same way, and notes how every rank ended (torch keeps one).
   Noticed by `test_a_refusal_in_a_rank_is_never_restarted` and `test_a_killed_rank_is_named_...` in
   tests/test_launch.py.
2. torch has no public name for the time-out that a process group's gloo really uses: `timeout_in_force` reads it.
   Noticed by `test_every_way_to_initialise_is_used_with_its_time_out` in tests/test_collectives.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

_SECONDS_TO_END = 1


class NoRestartAgent(LocalElasticAgent):
    """torch's agent for the ranks of this machine, which restarts no rank that ended with a final exit code.

    Args:
        final_codes: Exit codes after which nothing is started again.
        on_failure: Called once per failed attempt with the exit code of each rank, the agent's result, and whether
            the ranks are started again.
    """

    def __init__(
        self,
        *args: Any,
        final_codes: Container[int],
        on_failure: Callable[[dict[int, int | None], RunResult, bool], None],
        **kwargs: Any,
    ) -> None:
        # Seconds that ranks have to end before they are killed; older releases of torch set them by themselves.
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
            kwargs["shutdown_timeout"] = _SECONDS_TO_END
        super().__init__(*args, **kwargs)
        self._final_codes = final_codes
        self._on_failure = on_failure

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            processes = context._pc.processes  # type: ignore[union-attr]
            codes = {worker.global_rank: processes[worker.local_rank].exitcode for worker in worker_group.workers}
            # The one that failed first: the agent has ended the others by a signal, which is final for none of them.
            if any(failure.exitcode in self._final_codes for failure in result.failures.values()):
                self._remaining_restarts = 0
            self._on_failure(codes, result, self._remaining_restarts > 0)
        return result


def timeout_in_force() -> float:
    """Returns the seconds after which the default group's gloo gives a collective up, as gloo itself tells them."""
    group = dist.group.WORLD
    assert group is not None
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
