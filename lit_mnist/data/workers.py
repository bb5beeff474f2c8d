"""Loads samples one by one, with or without loader workers.

`--data.pipeline per_sample` selects this pipeline as a reference: up to rounding, it yields the batches of the
vectorized pipeline in `loader.py`, in the same order.

A loader worker is a process forked from a rank. It uses one thread and ends with its rank, however the rank ends. It
ignores the signals that stop a run: after a signal to the whole process group, such as Ctrl-C in a terminal, a rank
continues to its next checkpoint and needs its workers until then.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from lit_mnist.data.digits.split import Samples
from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.distributed.sample_order import Indices
from lit_mnist.distributed.signals import STOPPING, blocked

_Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

# Longer than a launcher waits for its ranks to stop.
_SECONDS_AFTER_SIGTERM = 10


class WorkerLostError(Exception):
    """A loader worker ended before its work was done."""


def load_batches(
    samples: Samples, batches: Sequence[Indices], workers: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the images and the targets of each batch, given the indices of its samples, int64 [batch].

    `workers` processes prefetch; with 0, this process loads a batch when it is requested.

    Raises:
        Exception: Raised by a worker, with its traceback in the message; if a worker was killed, WorkerLostError, or
            RuntimeError if torch notices it while it reads.
    """
    workers = min(workers, len(batches))
    loader = DataLoader(
        samples,
        batch_sampler=[indices.tolist() for indices in batches],
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=partial(_init_worker, os.getpid()),
        multiprocessing_context="fork" if workers else None,
        # The loader draws a seed for its workers, which must not change the state of the global generator.
        generator=torch.Generator(),
    )
    # A worker must not receive a signal before it has set its handlers.
    with blocked():
        loaded: Iterator[_Arrays] = iter(loader)
    if workers:
        _report_lost_workers()
    for number in range(len(batches)):
        arrays = next(loaded)
        if number + 1 == len(batches):
            # Ends the workers: a caller may keep the generator after the last batch.
            del loaded
        images, targets = arrays
        yield torch.from_numpy(images), torch.from_numpy(targets)


class _WorkerSignals:
    """The handler of SIGCHLD that torch has installed, with another type of error.

    torch raises RuntimeError wherever the rank is. `threading.Condition.notify`, with which the rank gives its workers
    indices, ignores this type: the rank would then wait forever for the rest of a batch that the worker was writing.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        try:
            self._handler(signum, frame)
        except RuntimeError as error:
            raise WorkerLostError(str(error)) from None


def _report_lost_workers() -> None:
    # torch has a handler in the main thread only.
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, _WorkerSignals):
            signal.signal(signal.SIGCHLD, _WorkerSignals(handler))


def _collate(samples: Sequence[tuple[torch.Tensor, Any]]) -> _Arrays:
    """Stacks samples.

    Workers send arrays through a pipe. Tensors would use shared memory and a socket in the temporary folder, which a
    killed process leaves behind.
    """
    images, targets = zip(*samples, strict=True)
    return torch.stack(images).numpy(), np.array(targets)


def _init_worker(rank_pid: int, _worker: int) -> None:
    die_with_parent(rank_pid)
    for signum in STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    # At exit, Python sends SIGTERM to the remaining workers and waits for them.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
