"""Loads samples one by one, with or without loader workers.

This is the only pipeline for segmentation images, which are files. For digits, `--data.pipeline per_sample` selects it
as a reference: up to rounding, it yields the batches of the vectorized pipeline in `loader.py`, in the same order.

A loader worker is a process forked from a rank. It uses one thread and ends with its rank, however the rank ends. It
ignores the signals that stop a run: after a signal to the whole process group, such as Ctrl-C in a terminal, a rank
continues to its next checkpoint and needs its workers until then.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from lit_mnist.data.digits.split import Samples
from lit_mnist.data.segmentation.split import SegmentationSamples
from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.distributed.sample_order import Indices
from lit_mnist.distributed.signals import STOPPING, blocked
from lit_mnist.errors import InputError

_Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

# Longer than a launcher waits for its ranks to stop.
_SECONDS_AFTER_SIGTERM = 10


def load_batches(
    samples: Samples | SegmentationSamples, batches: Sequence[Indices], workers: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the images and the targets of each batch, given the indices of its samples, int64 [batch].

    `workers` processes prefetch; with 0, this process loads a batch when it is requested.

    Raises:
        InputError: The file of a sample cannot be read.
        Exception: Raised by a worker, with its traceback in the message; RuntimeError if a worker was killed.
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
        loaded: Iterator[_Arrays | InputError] = iter(loader)
    for number in range(len(batches)):
        arrays = next(loaded)
        if isinstance(arrays, InputError):
            raise arrays
        if number + 1 == len(batches):
            # Ends the workers: a caller may keep the generator after the last batch.
            del loaded
        yield samples.batch(*map(torch.from_numpy, arrays))


def _collate(samples: Sequence[tuple[torch.Tensor, Any] | InputError]) -> _Arrays | InputError:
    """Stacks samples, or returns the error of a sample that cannot be read.

    Workers send arrays through a pipe. Tensors would use shared memory and a socket in the temporary folder, which a
    killed process leaves behind.
    """
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    images, targets = zip(*samples, strict=True)
    return torch.stack(images).numpy(), np.array(targets)


def _init_worker(rank_pid: int, _worker: int) -> None:
    die_with_parent(rank_pid)
    for signum in STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    # At exit, Python sends SIGTERM to the remaining workers and waits for them.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
