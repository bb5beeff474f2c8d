"""Distributed data parallel training in raw PyTorch, from top to bottom.

    python -m lit_mnist.engines.raw_ddp --devices 2                          the project forks the ranks
    python -m lit_mnist.engines.raw_ddp --devices 2 --launcher spawn         the project starts new Python processes
    torchrun --standalone --nproc-per-node 2 -m lit_mnist.engines.raw_ddp    torchrun starts the ranks

Every rank is a process that runs this file. It has a copy of the whole network and trains on its part of each batch.
The copies stay equal, because every rank takes the same step with the same gradient. Six things differ from training on
one device (compare `single.py`); the lines below are marked with their numbers:

(1) The ranks join a process group at the start and leave it at the end.
(2) Batch norm uses the statistics of all ranks, and DDP averages the gradients in the backward pass.
(3) Each rank takes its part of each batch. All ranks use the same order of samples, which changes with the epoch.
(4) The loss is scaled for float16 and for accumulation. Gradients are reduced once per optimizer step.
(5) Only rank 0 writes.
(6) The sums of an evaluation are reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.data.batch import Batch
from lit_mnist.data.dataset import Split
from lit_mnist.distributed.buffers import sync_buffers
from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS, device_options
from lit_mnist.distributed.precision import autocast, needs_scaler
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.sync_batch_norm import sync_batch_norm
from lit_mnist.profiling.timing import StepClock
from lit_mnist.training.accumulation import window_share
from lit_mnist.training.checkpoint_manager import CheckpointManager
from lit_mnist.training.evaluation import Evaluation, predict_with_probability
from lit_mnist.training.evaluation_loop import EvaluationSums, load_best_weights
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.recorder import MetricsRecorder, finish_experiment, make_loggers
from lit_mnist.training.schedule import make_schedule
from lit_mnist.training.state import TrainingState, net_weights


def run(job: ExperimentJob, rank: Rank) -> None:
    """Runs a job in one rank."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    device = job.devices.of(rank)
    if device.type == "cuda":
        # Otherwise every rank would also create a context on the first GPU.
        torch.cuda.set_device(device)
    dist.init_process_group(  # (1)
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous_store(rank, experiment.run.timeout),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=experiment.run.timeout),
    )
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: the images are in memory, and each rank cuts its part of each batch from them
    splits = job.splits
    train_batches = partial(job.train_batches, rank)  # (3)

    # --- model: every rank has the same initial weights, because they depend on the seed alone
    net = job.build_net(device)
    if job.sync_batchnorm:
        sync_batch_norm(net, device.type, experiment.run.timeout)  # (2)
    # `net` shares its parameters with the wrapper; it is the network that is saved and evaluated.
    model = DistributedDataParallel(net, **DDP_OPTIONS, **device_options(device.type, plan.accumulate))  # (2)

    # --- optimizer: equal gradients give equal steps on all ranks
    optimizer = make_optimizer(net, experiment.model, plan.lr)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = GradScaler(device.type, enabled=needs_scaler(job.precision))
    state = TrainingState(net, optimizer, schedule, scaler)

    # --- resume: every rank reads the checkpoint to the CPU and copies it to its device
    best = None
    if job.checkpoint and job.trains:
        best = state.restore(read_checkpoint(job.checkpoint))
    elif job.checkpoint:
        net.load_state_dict(net_weights(read_checkpoint(job.checkpoint, hashed=False)))

    # --- train
    trained = validation = None
    if job.trains:

        def save() -> None:
            if rank.is_first:  # (5)
                manager.write(state.checkpoint(job, manager.best))

        recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, step=state.step, loggers=loggers)
        manager = CheckpointManager(job, rank, net, save, step=state.step, check_finite=recorder.check_finite)
        if best is not None:
            manager.resume(best)
        # From here on, a signal stops all ranks after the same step, once the checkpoint is saved.
        with STOP.deferred(), manager:
            for epoch in range(plan.position(state.step)[0], plan.epochs):
                model.train()
                batches = train_batches(epoch, state.step)  # (3)
                for number, batch in enumerate(batches, start=batches.first):
                    images, targets, _, rng = batch.to(device)
                    ends_window = plan.ends_accumulation_window(number)
                    # Gradients accumulate on each rank. The last micro-batch of a window reduces them.
                    with nullcontext() if ends_window else model.no_sync():  # (4)
                        with autocast(job.precision, device):
                            logits = model(images, rng)
                            loss = mean_loss(logits, targets, experiment.model.label_smoothing)
                        share = window_share(loss, plan, number)  # (4)
                        scaler.scale(share).backward()  # (4)
                    recorder.on_batch_end(loss)
                    if not ends_window:
                        continue

                    scaler.unscale_(optimizer)  # (4)
                    recorder.on_before_optimizer_step(model.parameters())
                    if experiment.trainer.gradient_clip_val is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), experiment.trainer.gradient_clip_val)
                    lr, optimizer_steps = optimizer.param_groups[0]["lr"], state.optimizer_steps
                    # Skips the step on all ranks if the gradient, which they share, has overflowed.
                    scaler.step(optimizer)
                    scaler.update()  # (4)
                    optimizer.zero_grad()
                    state.step += 1
                    if state.optimizer_steps > optimizer_steps:
                        schedule.step()
                    else:
                        recorder.on_step_skipped(scaler)
                    recorder.on_step_end(logits, targets, lr)
                    manager.on_step_end(state.step, ends_epoch=number + 1 == len(batches))

                clock.pause()
                validated = _evaluate(job, rank, net, splits.validation) if plan.validates(epoch) else None
                validation = validated or validation
                recorder.on_epoch_end(epoch, validated, is_best=manager.update_best(validated))
                manager.on_epoch_end(state.step, recorder.show_epoch)
        trained = recorder.end_training(optimizer_steps=state.optimizer_steps)
    weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}

    # --- evaluate
    test: Evaluation | None = None
    if job.command == "train":
        load_best_weights(job, rank, net)
    if job.command in {"train", "test"}:
        test = _evaluate(job, rank, net, splits.test, keep_examples=True)
    elif job.command == "validate":
        validation = _evaluate(job, rank, net, splits.validation)
    elif job.command == "predict":
        outputs = _outputs(job, rank, net, splits.test)
        assert job.predictions
        job.predictions(job, rank, ((batch.indices, *predict_with_probability(logits)) for batch, logits in outputs))

    # --- record: rank 0 writes, but every rank takes part in the collectives
    finish_experiment(
        job, rank, weights=weights, clock=clock, trained=trained, validation=validation, test=test, loggers=loggers
    )
    dist.destroy_process_group()  # (1)


@torch.no_grad()
def _outputs(job: ExperimentJob, rank: Rank, net: nn.Module, split: Split) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Yields the batches of this rank's part of a split with their logits, to validate, test and predict.

    Each sample is evaluated on one rank. Ranks may have different numbers of samples; no samples are padded.
    """
    device = job.devices.of(rank)
    net.eval()
    sync_buffers(net)
    for host_batch in job.evaluation_batches(split, rank):
        batch = host_batch.to(device)
        with autocast(job.precision, device):
            logits = net(batch.images, None)
        yield batch, logits


def _evaluate(
    job: ExperimentJob, rank: Rank, net: nn.Module, split: Split, *, keep_examples: bool = False
) -> Evaluation:
    """Returns the metrics of a split; every rank must call it, and gets the same metrics."""
    sums = EvaluationSums(job.dataset.num_classes, job.devices.of(rank), examples=keep_examples)
    for batch, logits in _outputs(job, rank, net, split):
        sums.update(logits, batch.targets, batch.indices)
    # The mean of the ranks' means would be wrong, because ranks may have different numbers of samples.
    dist.all_reduce(sums.confusion)  # (6)
    dist.all_reduce(sums.sums)  # (6)
    return sums.compute(len(split))


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("raw_ddp")
