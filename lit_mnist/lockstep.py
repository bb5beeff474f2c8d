"""Two trainings that only keep in step: each rank trains on its own samples alone, and waits for the other.

    python -m lit_mnist.lockstep --batch-size 64 --steps 220

It is what communication is measured against (`make bench`): the same batches, network, optimizer and threads as raw
DDP on as many ranks, but one all-reduce of four bytes per step, and neither gradients nor batch norm's statistics
travel. With `--ddp` the gradients do, through DistributedDataParallel, and the statistics still do not.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.loader import TrainBatches
from lit_mnist.experiment import Experiment
from lit_mnist.job import Splits, plan_for, split_dataset
from lit_mnist.launch import launch
from lit_mnist.models.build import build_net
from lit_mnist.ranks import Rank, threads_per_rank
from lit_mnist.training.ddp import DDP_OPTIONS
from lit_mnist.training.measure import StepClock
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.schedule import make_schedule


def train_in_step(experiment: Experiment, splits: Splits, threads: int, with_ddp: bool, rank: Rank) -> None:
    """Trains one rank by itself, in step with the others; rank 0 prints the images per second of all."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    plan = plan_for(experiment, splits, rank.world_size)
    net = build_net(experiment.model, num_classes=10, seed=experiment.seed_everything)
    model = DistributedDataParallel(net, **DDP_OPTIONS) if with_ddp else net
    optimizer = make_optimizer(net, experiment.model)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    clock = StepClock(plan.batch_size, first_process=0)
    beat = torch.zeros(1)
    options = {"plan": plan, "settings": experiment.data, "seed": experiment.seed_everything, "rank": rank.rank}
    for batch in TrainBatches(splits.train, epoch=0, **options):  # type: ignore[arg-type]
        loss = F.cross_entropy(model(batch.images, batch.draw), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if not with_ddp:
            dist.all_reduce(beat)
        clock.step_done()
    if rank.is_first:
        print(clock.images_per_s(), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    experiment = (
        Experiment()
        .replace("data", batch_size=options.batch_size, val_size=0)
        .replace("trainer", max_steps=options.steps)
    )
    splits = split_dataset(experiment, load_dataset("mnist", None))
    work = partial(train_in_step, experiment, splits, threads_per_rank(None, options.ranks), options.ddp)
    with tempfile.TemporaryDirectory() as logs:
        launch(work, world_size=options.ranks, timeout=60, max_restarts=0, logs=Path(logs))


if __name__ == "__main__":
    main()
