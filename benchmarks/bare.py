"""Bare loops over tensors in memory: the reference for the speed of training and evaluation.

    python -m benchmarks.bare train --batch-size 64 --steps 220
    python -m benchmarks.bare infer
    python -m benchmarks.bare lightning

`train` makes steps of the default network and optimizer on float tensors. `infer` puts the 10,000 test images, which
are normalized before, through the network and counts the right answers; `infer-bytes` normalizes each batch in the
loop. `lightning` does the same with the Trainer and the project's exact metrics. The last line is JSON. Batch,
precision, memory format, kept memory and threads are those of the engines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lit_mnist.data.dataset import Split, load_dataset
from lit_mnist.data.loader import normalize
from lit_mnist.distributed.precision import UsedPrecision, autocast, resolve_precision
from lit_mnist.distributed.rank import keep_memory, threads_per_rank
from lit_mnist.experiment import Experiment, ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.profiling.timing import WARM_UP_STEPS, unshared_memory
from lit_mnist.training.optimizer import make_optimizer

_CPU = torch.device("cpu")
_EVALUATIONS = 7
_EVALUATION_BATCH = Experiment().data.evaluation_batch


def train(batch_size: int, steps: int, precision: UsedPrecision) -> dict[str, float]:
    """Trains with a bare loop, and returns its images per second over the median step after the warm-up."""
    split = load_dataset().train
    images = normalize(split.images.unsqueeze(1).float())
    net, settings = _net(), ModelSettings()
    optimizer = make_optimizer(net, settings)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    durations = []
    for step in range(steps):
        start = time.perf_counter()
        first = step * batch_size % (len(split) - batch_size)
        chosen = order[first : first + batch_size]
        with autocast(precision, _CPU):
            loss = F.cross_entropy(net(images[chosen]), split.labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        durations.append(time.perf_counter() - start)
    step_seconds = statistics.median(durations[WARM_UP_STEPS:])
    return {"images_per_s": batch_size / step_seconds, "memory_bytes": unshared_memory(os.getpid())}


def infer(precision: UsedPrecision, *, normalized: bool) -> dict[str, float]:
    """Evaluates with a bare loop, and returns its images per second: the median of several evaluations.

    Args:
        precision: The precision.
        normalized: Whether the images are normalized before, and not batch by batch in the loop.
    """
    split = load_dataset().test
    images = split.images.unsqueeze(1)
    if normalized:
        images = normalize(images.float())
    net = _net().eval()

    @torch.no_grad()
    def evaluate() -> None:
        right = 0
        for first in range(0, len(split), _EVALUATION_BATCH):
            rows = slice(first, first + _EVALUATION_BATCH)
            batch = images[rows] if normalized else normalize(images[rows].float())
            with autocast(precision, _CPU):
                logits = net(batch)
            right += int((logits.argmax(dim=1) == split.labels[rows]).sum())

    return _speed(evaluate, split)


def infer_by_lightning(precision: UsedPrecision) -> dict[str, float]:
    """Evaluates by the Trainer, as `infer` does."""
    # Here, since the other modes do without Lightning.
    from lit_mnist.datamodule import MNISTDataModule
    from lit_mnist.module import LitClassifier
    from lit_mnist.plugins.lightning_messages import hide_messages
    from lit_mnist.trainer import LitTrainer

    hide_messages()
    data = MNISTDataModule()
    trainer = LitTrainer(
        precision=precision,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = LitClassifier()
    return _speed(lambda: trainer.test(module, datamodule=data, verbose=False), data.batches.splits.test)


def _net() -> nn.Module:
    return build_net(ModelSettings(), num_classes=10, seed=42).to(memory_format=torch.channels_last)


def _speed(evaluate: Callable[[], object], split: Split) -> dict[str, float]:
    durations = []
    for _ in range(_EVALUATIONS):
        start = time.perf_counter()
        evaluate()
        durations.append(time.perf_counter() - start)
    # The first one also starts threads and fills caches.
    return {"images_per_s": len(split) / statistics.median(durations[1:])}


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("train", "infer", "infer-bytes", "lightning"))
    parser.add_argument("--batch-size", type=int, default=Experiment().data.batch_size)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--precision", choices=("auto", "32-true", "bf16-mixed", "16-mixed"), default="auto")
    parser.add_argument("--threads", type=int, default=threads_per_rank(None, 1))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    precision = resolve_precision(options.precision, "cpu")
    if options.mode == "train":
        numbers = train(options.batch_size, options.steps, precision)
    elif options.mode != "lightning":
        numbers = infer(precision, normalized=options.mode == "infer")
    else:
        numbers = infer_by_lightning(precision)
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
