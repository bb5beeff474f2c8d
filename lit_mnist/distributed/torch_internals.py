"""The private parts of torch that this folder uses, with the tests that detect a change in torch.

- `RankAgent` overrides private methods of torch's elastic agent. Detected in tests/distributed/test_launcher.py by
  `test_an_input_error_in_a_rank_never_causes_a_restart` and
  `test_files_that_another_user_plants_in_the_temporary_folder_are_not_executed`, and in tests/faults/test_kill.py by
  `test_no_process_remains_after_one_process_is_killed`.
- `set_env_rendezvous` replaces a registered handler, and `AGENT_STORE` is an undocumented variable. Detected by
  `test_nothing_listens_beyond_loopback_and_no_rank_loads_a_pickle` (tests/distributed/test_launcher.py).
- `write_error_file` writes a file that torchrun reads, and `is_gloo_error` matches the text of gloo's errors. Detected
  by tests/distributed/test_distributed_internals.py.
- `channel_statistics`, `affine_gradients` and `weighted_sum` call kernels of batch norm. Detected by
  tests/models/test_network_internals.py. `check_input` calls a method of its layers. Detected by
  `test_sync_batch_norm_accepts_and_rejects_what_batch_norm_does` (tests/models/test_networks.py).
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.rendezvous import _rendezvous_handlers

from lit_mnist.distributed.private_folder import temporary_files_in
from lit_mnist.distributed.signals import STOP, blocked

# If it is "True", rank 0 does not open a store, since the launcher has opened one.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# gloo's errors begin with the place in its source that raised them.
_RAISED_BY_GLOO = re.compile(r"\[[^\] ]*\bgloo/transport/[^\] ]*:\d+\]")
# Half a megabyte of 32-bit values.
_VALUES_AT_ONCE = 1 << 17
_SECONDS_TO_EXIT = 1
_SECONDS_TO_DIE = 10


@dataclass(frozen=True)
class FailedAttempt:
    """The ranks at the time of a failure, before the agent ends the remaining ranks.

    Attributes:
        exit_codes: The exit code of each rank: None if it was running, -N if signal N killed it.
        pids: The process ID of each rank.
    """

    exit_codes: dict[int, int | None]
    pids: dict[int, int]

    def followed_by(self, later: FailedAttempt) -> FailedAttempt:
        """Returns this attempt with the ranks that have failed by themselves since.

        A rank may exit before the rank that it lost, which still writes its report.
        """
        since = {rank: code for rank, code in later.exit_codes.items() if code and code > 0}
        codes = {rank: since.get(rank) if code is None else code for rank, code in self.exit_codes.items()}
        return FailedAttempt(codes, self.pids)


class RankAgent(LocalElasticAgent):
    """torch's elastic agent with faster shutdown, restarts that depend on the exit code, and failure reports.

    The base class restarts the ranks after any failure, waits 30 seconds for the remaining ranks, reports the exit code
    of one rank, and raises an exception on a signal.

    Args:
        private: The private folder of the launch. torch unpickles error files, so they must be in this folder.
        no_restart_exit_codes: Exit codes after which the ranks are not restarted.
        on_failure: Called after each failed attempt with the attempt, and with whether the ranks are restarted.
        while_running: Called repeatedly with the process IDs of the ranks.
    """

    def __init__(
        self,
        *args: Any,
        private: Path,
        no_restart_exit_codes: Container[int],
        on_failure: Callable[[FailedAttempt, bool], None],
        while_running: Callable[[Iterable[int]], None],
        **kwargs: Any,
    ) -> None:
        # The project reports failures and handles signals itself. The agent must handle at least one signal.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        # Older releases of torch have no such argument.
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
            kwargs["shutdown_timeout"] = _SECONDS_TO_EXIT
        super().__init__(*args, **kwargs)
        self._private = private
        self._final_codes = no_restart_exit_codes
        self._on_failure = on_failure
        self._while_running = while_running

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Signals stay blocked until the ranks have installed their handlers. Older releases of torch replace handlers.
        with blocked(), temporary_files_in(self._private):
            started = super()._start_workers(worker_group)
            STOP.register()
        context = self._pcontext._pc  # type: ignore[union-attr]
        if "grace_period" in inspect.signature(context.join).parameters:
            context.join = partial(context.join, grace_period=_SECONDS_TO_EXIT)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._while_running(self._pcontext.pids().values())  # type: ignore[union-attr]
        attempt = self._current_attempt(worker_group)
        codes = [code for code in attempt.exit_codes.values() if code]
        if codes:
            # torch would wait 30 seconds for the remaining ranks.
            end_processes(self._pcontext._pc.processes)  # type: ignore[union-attr]
            attempt = attempt.followed_by(self._current_attempt(worker_group))
            codes = [code for code in attempt.exit_codes.values() if code]
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            if not codes:
                # A rank has exited since the check, and torch has ended the others: only its result has the first one.
                first = {rank: failure.exitcode for rank, failure in result.failures.items()}
                attempt = FailedAttempt(dict.fromkeys(attempt.exit_codes) | first, attempt.pids)
                codes = list(first.values())
            if STOP.received_signal or any(code in self._final_codes for code in codes):
                self._remaining_restarts = 0
            self._on_failure(attempt, self._remaining_restarts > 0)
        return result

    def _current_attempt(self, worker_group: WorkerGroup) -> FailedAttempt:
        processes = self._pcontext._pc.processes  # type: ignore[union-attr]
        ranks = {worker.global_rank: processes[worker.local_rank] for worker in worker_group.workers}
        return FailedAttempt(
            {rank: process.exitcode for rank, process in ranks.items()},
            {rank: process.pid for rank, process in ranks.items()},
        )


def end_processes(processes: Iterable[BaseProcess]) -> None:
    """Waits a second for processes to exit, and kills those that remain."""
    processes = list(processes)
    _join(processes, _SECONDS_TO_EXIT)
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
    # A process that waits for a GPU driver does not react even to SIGKILL.
    _join(processes, _SECONDS_TO_DIE)


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def set_env_rendezvous(handler: Callable[..., Iterator[tuple[dist.Store, int, int]]]) -> None:
    """Sets the rendezvous handler of `init_method="env://"`, which yields the store, the rank and the world size."""
    _rendezvous_handlers["env"] = handler


def write_error_file(message: str, stack: str, seconds: float) -> None:
    """Writes torchrun's error file if torchrun has started this process.

    Args:
        message: The error message.
        stack: The traceback.
        seconds: Time of the error in seconds since 1970.
    """
    if path := os.environ.get(_ERROR_FILE):
        extra = {"py_callstack": stack, "timestamp": str(int(seconds))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def is_gloo_error(error: BaseException) -> bool:
    """Returns whether the message of an error is one of gloo's transport."""
    return type(error) is RuntimeError and _RAISED_BY_GLOO.match(str(error)) is not None


def check_input(layer: nn.Module, x: torch.Tensor) -> None:
    """Raises torch's ValueError for an input whose number of dimensions a batch norm does not accept."""
    layer._check_input_dim(x)  # type: ignore[operator]


def channel_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and biased variance of each channel of [batch, channels, ...], at least in float32.

    This kernel takes a tenth of the time of `torch.var_mean`. The result has the dtype of the running statistics.
    """
    dtype, channels = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    mean, variance = torch.batch_norm_update_stats(
        x, torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype), 0.0
    )
    return mean, variance


def affine_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of weight and bias of a batch norm with constant statistics."""
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, variance, None, None, False, eps, [False, True, True]
    )
    return grad_weight, grad_bias


def weighted_sum(
    x: torch.Tensor, y: torch.Tensor, of_x: torch.Tensor, of_y: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Returns of_x * x + offset + of_y * y for each channel, with the layout of `x` and the dtype of `y`.

    The terms are computed by the kernel of batch norm, with at least 32 bits, for as many samples at once as the
    processor's cache holds. Without that, memory for three more tensors is mapped and cleared in each call.

    Args:
        x: [batch, channels, ...].
        y: The same shape.
        of_x: [channels], in at least float32.
        of_y: [channels], as `of_x`.
        offset: [channels], as `of_x`.
    """
    wide, result = of_x.dtype, torch.empty_like(x, dtype=y.dtype)
    zero, unused = torch.zeros_like(of_x), of_x.new_empty(0)
    # A mean of 0, a variance of 1 and no epsilon, which `torch.nn.functional.batch_norm` rejects in some releases, 2.11
    # among them: the kernel multiplies by the weight and adds the bias.
    as_is = zero, torch.ones_like(of_x), False, 0.0, 0.0
    samples = max(1, _VALUES_AT_ONCE * torch.get_num_threads() // max(1, y[0].numel()))
    wide_x, wide_y = (torch.empty_like(values[:samples], dtype=wide) for values in (x, y))
    for start in range(0, len(y), samples):
        part = slice(start, start + samples)
        x_part, y_part, result_part = x[part], y[part], result[part]
        term, other = result_part if y.dtype == wide else wide_x[: len(y_part)], wide_y[: len(y_part)]
        x_part = x_part if x.dtype == wide else term.copy_(x_part)
        y_part = y_part if y.dtype == wide else other.copy_(y_part)
        torch.native_batch_norm(x_part, of_x, offset, *as_is, out=(term, unused, unused))
        torch.native_batch_norm(y_part, of_y, zero, *as_is, out=(other, unused, unused))
        result_part.copy_(term.add_(other))
    return result
