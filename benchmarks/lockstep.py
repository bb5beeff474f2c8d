"""Trainings without a framework, to measure communication against: each rank trains on its own samples.

    python -m benchmarks.lockstep --ranks 2 --batch-size 128 --steps 220
    python -m benchmarks.lockstep --ranks 2 --batch-size 128 --steps 220 --ddp

The batches, network, optimizer, precision and threads are those of raw DDP on as many ranks. In a step the ranks
exchange one all-reduce of four bytes, so that they wait for each other; nothing with `--independent`; the gradients
with `--ddp`, through DistributedDataParallel, and with `--flat`, by one all-reduce after the backward pass. The
statistics of batch norm are never exchanged. The last line is JSON: images per second of all ranks, milliseconds of a
step, and unshared memory (USS) of a rank in bytes, the median over the ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs import launch_ranks
from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.loader import TrainBatches
from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS
from lit_mnist.distributed.precision import autocast, resolve_precision
from lit_mnist.distributed.rank import Rank, keep_memory, threads_per_rank
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import InputError, LitMnistError
from lit_mnist.experiment import Experiment
from lit_mnist.models.build import build_net
from lit_mnist.profiling.timing import WARM_UP_STEPS, StepClock
from lit_mnist.training.job import Splits, plan_for, split_dataset
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.schedule import make_schedule

Shared = Literal["step", "nothing", "ddp", "flat"]
_CPU = torch.device("cpu")
_SECONDS_TO_WAIT = 60


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        ranks: Number of ranks.
        batch_size: Samples of a step over all ranks.
        steps: Optimizer steps, warm-up included.
        precision: `auto`, `32-true` or `bf16-mixed`.
        threads: Threads of each rank; by default the cores divided by the ranks.
        shared: What the ranks share in each step: `step`, `nothing`, `ddp` or `flat`.
    """

    ranks: int = 2
    batch_size: int = 64
    steps: int = 220
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    threads: int | None = None
    shared: Shared = "step"

    def __post_init__(self) -> None:
        for name in ("ranks", "batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, but is {value}.")
        if self.steps <= WARM_UP_STEPS:
            raise InputError(
                f"--steps must be above {WARM_UP_STEPS}, the steps that are left out as warm-up, but is {self.steps}."
            )

    def experiment(self) -> Experiment:
        """Returns the experiment: the default one, on all training samples, for as many epochs as the steps take."""
        trainer = {"max_steps": self.steps, "max_epochs": self.steps, "precision": self.precision}
        return Experiment().replace("data", batch_size=self.batch_size, val_size=0).replace("trainer", **trainer)


def train_in_step(options: Options, splits: Splits, rank: Rank) -> None:
    """Trains one rank; rank 0 prints the result of all."""
    torch.set_num_threads(threads_per_rank(options.threads, rank.local_world_size))
    keep_memory()
    timeout = timedelta(seconds=_SECONDS_TO_WAIT)
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    experiment, shared = options.experiment(), options.shared
    plan = plan_for(experiment, splits, rank.world_size)
    precision = resolve_precision(experiment.trainer.precision, _CPU.type)
    net = build_net(experiment.model, num_classes=10, seed=experiment.seed_everything)
    net.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(net, **DDP_OPTIONS) if shared == "ddp" else net
    optimizer = make_optimizer(net, experiment.model)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    # Without anything shared a rank's time is its own, and so are the images that it counts.
    counted = plan.batch_size // rank.world_size if shared == "nothing" else plan.batch_size
    clock = StepClock(first_process=0)
    beat = torch.zeros(1)
    dist.barrier()
    for epoch in range(plan.epochs):
        for batch in TrainBatches(
            splits.train,
            plan=plan,
            settings=experiment.data,
            seed=experiment.seed_everything,
            epoch=epoch,
            rank=rank.rank,
        ):
            with autocast(precision, _CPU):
                loss = F.cross_entropy(model(batch.images, batch.rng), batch.targets)
            loss.backward()
            if shared == "flat":
                average_flat(net, rank.world_size)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if shared == "step":
                dist.all_reduce(beat)
            clock.on_step_end()
    clock.update_peak_memory()
    _report(clock, counted, options, rank)
    dist.destroy_process_group()


def average_flat(net: nn.Module, world_size: int) -> None:
    """Replaces a network's gradients by their means over the ranks, by one all-reduce; every rank must call it."""
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _report(clock: StepClock, counted: int, options: Options, rank: Rank) -> None:
    """Combines the numbers of the ranks; rank 0 prints them."""
    steps = clock.steps_per_s()
    assert steps is not None
    own = torch.tensor([[steps * counted, float(clock.peak_memory)]], dtype=torch.float64)
    ranks = own.new_empty(rank.world_size, 2)
    dist.all_gather_into_tensor(ranks, own)
    speeds, memory = ranks.T.tolist()
    images_per_s = sum(speeds) if options.shared == "nothing" else speeds[0]
    if rank.is_first:
        numbers = {
            "images_per_s": images_per_s,
            "step_ms": 1000 * options.batch_size / images_per_s,
            "memory_bytes": statistics.median(memory),
        }
        print(json.dumps(numbers), flush=True)


def read_options(argv: list[str]) -> Options:
    """Parses a command line.

    Raises:
        InputError: A number is out of range.
    """
    given = Options()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lockstep",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=given.ranks)
    parser.add_argument("--batch-size", type=int, default=given.batch_size, help="samples of a step over all ranks")
    parser.add_argument("--steps", type=int, default=given.steps)
    parser.add_argument("--precision", choices=("auto", "32-true", "bf16-mixed"), default=given.precision)
    parser.add_argument("--threads", type=int, help="threads of each rank (cores / ranks)")
    modes = parser.add_mutually_exclusive_group()
    parser.set_defaults(shared=given.shared)
    for flag, shared in (("--independent", "nothing"), ("--ddp", "ddp"), ("--flat", "flat")):
        modes.add_argument(flag, dest="shared", action="store_const", const=shared)
    return Options(**vars(parser.parse_args(argv)))


def main(argv: list[str] | None = None) -> int:
    """Starts the ranks and returns the exit code.

    Args:
        argv: The arguments; by default the process's own.
    """
    # The ranks are forked from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
        experiment = options.experiment()
        splits = split_dataset(experiment, load_dataset())
        plan_for(experiment, splits, options.ranks)
        launch_ranks(partial(train_in_step, options, splits), options.ranks)
    except LitMnistError as error:
        print_error(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
