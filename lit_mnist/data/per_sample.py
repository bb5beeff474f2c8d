"""The classic data path: every sample is turned by itself, as most MNIST scripts do, in loader workers or without.

`--data.pipeline per_sample --data.workers 4` chooses it. It is kept as a yardstick: up to rounding its batches are
those that `loader.py` cuts in one step, in the same order, so that only the time differs. Segmentation images are
files, and are read in no other way.

A loader worker is a forked child of a rank. It uses one thread, ends with its rank however that ends, and leaves
stopping to it: a signal to the whole process group, such as Ctrl-C in a terminal, must not take the workers away from
a rank that goes on to its next checkpoint.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from lit_mnist.data.digits.idx import Split
from lit_mnist.data.sampler import Indices
from lit_mnist.data.segmentation.images import Pixels, SegmentationSamples
from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.distributed.signals import STOPPING, blocked
from lit_mnist.errors import InputError

Augment = Callable[[torch.Tensor, Indices], torch.Tensor]
_Arrays = tuple[npt.NDArray[np.floating | np.uint8], npt.NDArray[np.int64 | np.uint8]]

_START_METHOD = "fork" if platform.system() == "Linux" else "spawn"
# Longer than a launcher waits for its ranks to stop.
_SECONDS_AFTER_SIGTERM = 10


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """The samples of a split, each turned from grey values to a normalised image when it is asked for.

    Args:
        split: The samples.
        mean: Mean of the pixels as a share of 255.
        std: Their standard deviation, likewise.
        dtype: Floating-point type of the images. The grey values are divided in float32 first, as ToTensor does.
        augment: Changes float images, [1, 1, height, width], given their numbers, int64 [1]; unset: nothing does.
    """

    def __init__(
        self, split: Split, *, mean: float, std: float, dtype: torch.dtype, augment: Augment | None = None
    ) -> None:
        self.split = split
        self.dtype = dtype
        self.augment = augment
        self.to_tensor = transforms.ToTensor()
        self.normalise = transforms.Normalize((mean,), (std,))

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Returns a sample's image, [1, height, width], and its class."""
        image = self.to_tensor(Image.fromarray(self.split.images[index].numpy())).to(self.dtype)
        if self.augment:
            image = self.augment(image[None], np.array([index]))[0]
        return self.normalise(image), int(self.split.labels[index])


def load_batches(
    samples: Samples | SegmentationSamples, chosen: Sequence[Indices], workers: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the images and the targets of one batch after the other, each stacked as the samples give them.

    Args:
        samples: The samples: of digits [1, height, width] and a number, of scenes see `SegmentationSamples`.
        chosen: The samples' numbers of each batch, int64 [batch].
        workers: Processes that load ahead; 0: the samples are turned in this process, when a batch is asked for.

    Raises:
        InputError: A scene's file cannot be read.
        Exception: What a worker raised, with its traceback in the message; RuntimeError where one was killed.
    """
    workers = min(workers, len(chosen))
    loader = DataLoader(
        samples,
        batch_sampler=[indices.tolist() for indices in chosen],
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        multiprocessing_context=_START_METHOD if workers else None,
        # It draws a seed for its workers: not from the global generator, which stays as it was.
        generator=torch.Generator(),
    )
    # So that no worker meets a signal before it has its own way with signals.
    with blocked():
        arrays: Iterator[_Arrays | InputError] = iter(loader)
    for number in range(len(chosen)):
        batch = next(arrays)
        if isinstance(batch, InputError):
            raise batch
        images, targets = batch
        if number + 1 == len(chosen):
            # The workers end with it: who asks for no more than there are batches may keep this generator for long.
            del arrays
        yield torch.from_numpy(images), torch.from_numpy(targets)


def _collate(samples: Sequence[tuple[torch.Tensor, int | Pixels] | InputError]) -> _Arrays | InputError:
    """Makes a batch of samples, as arrays; or returns the error of one that cannot be read.

    Tensors would travel through shared memory and a socket in the temporary folder, which a killed process leaves
    behind; arrays go through a pipe.
    """
    sound = []
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
        sound.append(sample)
    images, targets = zip(*sound, strict=True)
    return torch.stack(images).numpy(), np.array(targets)


def _begin_worker(rank: int, _worker: int) -> None:
    """Runs first in each worker; torch has set its threads to one already.

    Args:
        rank: The process of the rank that has started it.
    """
    die_with_parent(rank)
    for signum in STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    # Python ends the workers that are left at its exit by SIGTERM, and waits for them.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
