"""The places where the project reaches into a library's private parts, each with a test that notices a change.

1. torch's elastic agent restarts its ranks after any failure, waits half a minute for those that are left, and
   answers a signal by an exception: `WatchfulAgent` keeps it from restarting where the rank's exit code says that
   another try would end the same way, notes how every rank ended (torch keeps one), and ends the others at once.
   torch's launchers unpickle what they find in a temporary folder; `WatchfulAgent` gives them a private one.
   Noticed by `test_nothing_that_another_user_plants_in_the_temporary_folder_is_executed` and
   `test_a_refusal_in_a_rank_is_never_restarted` in tests/distributed/test_launcher.py, and by
   `test_nothing_is_left_of_a_run_of_which_one_process_is_killed` in tests/faults/test_kill.py.
2. torch has no public name for the time-out that a process group's gloo really uses: `timeout_in_force` reads it.
   Noticed by `test_every_way_to_initialise_is_used_with_its_time_out` in tests/examples/test_collectives.py.
3. Lightning's handler of SIGTERM and its broadcast at each step: `leave_signals_alone` takes both away. Noticed by
   `test_lightning_leaves_signals_and_steps_alone` in tests/faults/test_signals.py.
4. DDP's own measurements, which are a prototype of torch's: `measure_every_step` and `hidden_all_reduce_ms`. Noticed by
   `test_all_parts_are_timed_and_make_up_the_step` in tests/benchmarks/test_waterfall.py.
5. Lightning writes the name of the running hook into the module before and after each, some 40 times per step, and
   `nn.Module` looks each time whether it is a parameter: `PlainHookName` spares it. Noticed by
   `test_lightning_notes_its_hooks_without_a_search_for_parameters` in tests/test_template.py.
6. torch's profiler knows the types of what an operation was given, and its events tell them in newer releases only:
   `operations_of` asks below them. Noticed by `test_the_formulas_count_what_a_rank_sends` in
   tests/benchmarks/test_scaling_model.py.
7. torch has no public way to say what a process group that is made by the environment meets in, and would open a store
   that any user of the machine can write to: `find_each_other_by` replaces it. Noticed by
   `test_nothing_listens_beyond_loopback` in tests/distributed/test_launcher.py.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from lit_mnist.distributed.private_folder import temporary_files_in
from lit_mnist.distributed.signals import STOP, blocked

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

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


def leave_signals_alone(trainer: Trainer) -> None:
    """Keeps Lightning's Trainer from handling signals, and from asking at each step whether one has come.

    Its handler of SIGTERM takes part in a collective, which waits for ever where the other ranks are not in it, and
    each step pays a broadcast to learn of a signal. The project's own `STOP` and `Agreement` do both.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def operations_of(profiled: profile) -> list[tuple[str, list[list[int]], list[str]]]:
    """Returns the operations that a profiler has seen: name, and the shapes and types of what each was given."""
    results = profiled.profiler.kineto_results if profiled.profiler else None
    return [(event.name(), event.shapes(), event.dtypes()) for event in (results.events() if results else ())]


class PlainHookName:
    """A LightningModule's first base: it keeps the name of the running hook as any object would."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


def timeout_in_force() -> float:
    """Returns the seconds after which the default group's gloo gives a collective up, as gloo itself tells them."""
    group = dist.group.WORLD
    assert group is not None
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def measure_every_step(model: DistributedDataParallel) -> None:
    """Lets DDP measure its communication in each step, instead of in each hundredth: a prototype of torch's."""
    model._set_ddp_runtime_logging_sample_rate(1)


def hidden_all_reduce_ms(model: DistributedDataParallel) -> float | None:
    """Returns how long gradients travelled while others were computed, in milliseconds per step, as DDP measures it."""
    found = model._get_ddp_logging_data()
    if found.get("num_buckets_reduced") == 1:
        # It leaves with the last gradient: what DDP counts is the time that its launch takes.
        return 0.0
    hidden = found.get("avg_backward_compute_comm_overlap_time")
    return None if hidden is None else float(hidden) / 1e6
