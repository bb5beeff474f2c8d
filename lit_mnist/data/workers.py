"""Batches of samples that are loaded one by one, with loader workers or without.

Segmentation images are files, and are always loaded like this. For digits, `--data.pipeline per_sample` selects it as
a reference: up to rounding, the batches are those that `loader.py` cuts in one step, in the same order.

A loader worker is a process forked from a rank. It uses one thread and ends with its rank, however the rank ends. It
ignores the signals that stop a run: after a signal to the whole process group, such as Ctrl-C in a terminal, a rank
continues to its next checkpoint and needs its workers until then.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from lit_mnist.data.digits.split import Samples
from lit_mnist.data.sampler import Indices
from lit_mnist.data.segmentation.split import SegmentationSamples
from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.distributed.signals import STOPPING, blocked
from lit_mnist.errors import InputError

_Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

_START_METHOD = "fork" if platform.system() == "Linux" else "spawn"
# Longer than a launcher waits for its ranks to stop.
_SECONDS_AFTER_SIGTERM = 10


def load_batches(
    samples: Samples | SegmentationSamples, batches: Sequence[Indices], workers: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the images and the targets of each batch.

    Args:
        samples: The samples of a split.
        batches: The indices of the samples of each batch, int64 [batch].
        workers: Processes that load ahead; with 0, this process loads a batch when it is requested.

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
        worker_init_fn=partial(_begin_worker, os.getpid()),
        multiprocessing_context=_START_METHOD if workers else None,
        # It draws a seed for its workers. The state of the global generator must not change.
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
            # This ends the workers: a caller may keep the generator after the last batch.
            del loaded
        yield samples.batch(*map(torch.from_numpy, arrays))


def _collate(samples: Sequence[tuple[torch.Tensor, Any] | InputError]) -> _Arrays | InputError:
    """Stacks samples to arrays, or returns the error of a sample that cannot be read.

    Arrays go through a pipe. Tensors would go through shared memory and a socket in the temporary folder, which a
    killed process leaves behind.
    """
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    images, targets = zip(*samples, strict=True)
    return torch.stack(images).numpy(), np.array(targets)


def _begin_worker(rank: int, _worker: int) -> None:
    """Prepares a worker process; torch has set its threads to one already.

    Args:
        rank: The process ID of the rank that has started it.
    """
    die_with_parent(rank)
    for signum in STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    # At its exit, Python ends the remaining workers by SIGTERM and waits for them.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
