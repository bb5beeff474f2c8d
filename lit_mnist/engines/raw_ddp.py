"""Distributed data parallel training by hand: the file to read for how it works.

    python -m lit_mnist.engines.raw_ddp --devices 2                       the project starts the ranks
    torchrun --standalone --nproc-per-node 2 -m lit_mnist.engines.raw_ddp    torchrun does
    python -m lit_mnist.engines.raw_ddp --devices 2 --launcher spawn      the same, as new Python processes

Every rank runs this file from top to bottom, in a process of its own. Each has the whole network and a part of each
batch; what keeps the networks equal is that every rank makes the same step with the same gradient. Six things make the
difference to a training on one device (compare `single.py`), each marked by its number where it happens:

(1) The ranks join a process group at the start, and leave it at the end.
(2) The network is wrapped: its batch norm sees all ranks' samples, and its backward pass averages the gradients.
(3) Each rank takes its own part of each batch, from an order that all agree on and that changes with the epoch.
(4) The loss is scaled, for float16 and for accumulation; gradients travel once per optimizer step.
(5) One process alone writes.
(6) An evaluation's sums are added up over the ranks.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.checkpoint.state import TrainingState, net_weights
from lit_mnist.data.dataset import AnySplit
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.signals import STOP
from lit_mnist.models.build import build_net
from lit_mnist.models.sync_batch_norm import broadcast_buffers, sync_batch_norm
from lit_mnist.run.finish import finish, write_predictions
from lit_mnist.run.metrics_log import loggers_of
from lit_mnist.run.recorder import MetricsRecorder
from lit_mnist.run.timing import StepClock
from lit_mnist.training.ddp import DDP_OPTIONS, device_options
from lit_mnist.training.evaluate import predict
from lit_mnist.training.evaluation import Evaluation, EvaluationSums
from lit_mnist.training.examples import Example
from lit_mnist.training.job import Job
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss, make_optimizer
from lit_mnist.training.precision import autocast, needs_scaler, weight_dtype
from lit_mnist.training.schedule import make_schedule


def run(job: Job, rank: Rank) -> None:
    """Does a job in one rank."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    device = job.devices.of(rank)
    if device.type == "cuda":
        # Else every rank would open a context on the first GPU, too.
        torch.cuda.set_device(device)
    # The launcher has written into the environment where the ranks meet.
    dist.init_process_group(  # (1)
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous_store(rank, experiment.run.timeout),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=experiment.run.timeout),
    )
    clock = StepClock(plan.batch_size * plan.accumulate, job.first_process)
    loggers = loggers_of(job, rank)

    # --- data: cut from memory, epoch by epoch

    # --- model: the same initial weights on every rank, since they follow from the seed
    net = build_net(
        experiment.model, num_classes=job.dataset.num_classes, seed=experiment.seed_everything, weights=job.weights
    )
    net.to(device, weight_dtype(job.precision)).to(memory_format=torch.channels_last)
    if job.sync_batchnorm:
        sync_batch_norm(net, device.type, experiment.run.timeout)  # (2)
    # It shares its parameters with `net`, which stays the network to save and to evaluate.
    model = DistributedDataParallel(net, **DDP_OPTIONS, **device_options(device.type, plan.accumulate))  # (2)

    # --- optimizer: one on each rank; equal gradients make equal steps
    optimizer = make_optimizer(net, replace(experiment.model, lr=plan.lr))
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = GradScaler(device.type, enabled=needs_scaler(job.precision))
    state = TrainingState(net, optimizer, schedule, scaler)
    # The scaler skips a step whose gradient overflowed: this counts the steps that the optimizer takes.
    optimizer.register_step_post_hook(lambda *_: setattr(state, "optimizer_steps", state.optimizer_steps + 1))

    # --- resume: every rank reads the checkpoint, onto the CPU and from there to its own device
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
        # From here on a signal is obeyed between two steps, by all ranks together, once the training is saved.
        with STOP.deferred(), manager:
            for epoch in range(plan.position(state.step)[0], plan.epochs):
                _train_epoch(job, rank, epoch, model, state, manager, recorder)
                clock.pause()
                validated = _evaluate(job, rank, net, job.splits.validation) if plan.validates(epoch) else None
                validation = validated or validation
                recorder.epoch_done(epoch, validated, is_best=manager.update_best(validated))
                manager.epoch_done(state.step, recorder.show_epoch)
        trained = recorder.close(optimizer_steps=state.optimizer_steps)
    weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}

    # --- evaluate
    test: Evaluation | None = None
    examples: list[Example] = []
    if job.command == "train":
        # Rank 0 has written the file, and on another machine there is none: it reads, and sends the weights around.
        if rank.is_first:
            net.load_state_dict(net_weights(read_checkpoint(job.folder / "checkpoints" / BEST)))
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)
    if job.command in {"train", "test"}:
        test = _evaluate(job, rank, net, job.splits.test, examples)
    elif job.command == "validate":
        validation = _evaluate(job, rank, net, job.splits.validation)
    elif job.command == "predict":
        write_predictions(job, rank, predict(job, rank, net))

    # --- record: every rank takes part in the sums, rank 0 writes
    finish(
        job,
        rank,
        device=device,
        weights=weights,
        clock=clock,
        trained=trained,
        validation=validation,
        test=test,
        examples=examples,
        loggers=loggers,
    )
    dist.destroy_process_group()  # (1)


def _train_epoch(
    job: Job,
    rank: Rank,
    epoch: int,
    model: DistributedDataParallel,
    state: TrainingState,
    manager: CheckpointManager,
    recorder: MetricsRecorder,
) -> None:
    plan, settings, device = job.plan, job.experiment.model, job.devices.of(rank)
    optimizer, scaler, max_norm = state.optimizer, state.scaler, job.experiment.trainer.gradient_clip_val
    model.train()

    batches = job.train_batches(rank, epoch, state.step)  # (3)
    for number, batch in enumerate(batches, start=batches.first):
        images, targets, _, draw = batch.to(device)
        closes_window = plan.closes_window(number)
        # The gradients of a window add up on each rank, and are averaged over the ranks with its last micro-batch.
        with nullcontext() if closes_window else model.no_sync():  # (4)
            with autocast(job.precision, device):
                logits = model(images, draw)
                loss = mean_loss(logits, targets, settings.label_smoothing)
            share = accumulated_loss(loss, plan.window(number), plan.accumulate) / plan.accumulate  # (4)
            scaler.scale(share).backward()  # (4)
        recorder.batch_done(loss)
        if not closes_window:
            continue

        scaler.unscale_(optimizer)  # (4)
        recorder.gradients_done(model.parameters())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        rate, made = optimizer.param_groups[0]["lr"], state.optimizer_steps
        # Leaves the step out where a gradient overflowed: on all ranks, since all have the same gradient.
        scaler.step(optimizer)
        scaler.update()  # (4)
        optimizer.zero_grad()
        state.step += 1
        if state.optimizer_steps > made:
            state.schedule.step()
        else:
            recorder.step_skipped(scaler)
        recorder.step_done(logits, targets, rate)
        manager.step_done(state.step, ends_epoch=number + 1 == len(batches))


@torch.no_grad()
def _evaluate(
    job: Job, rank: Rank, net: nn.Module, split: AnySplit, examples: list[Example] | None = None
) -> Evaluation:
    """Evaluates a split: `lit_mnist.training.evaluate.evaluate`, which the other engines share, written out."""
    device = job.devices.of(rank)
    sums = EvaluationSums(job.dataset.num_classes, device, examples=examples is not None)
    net.eval()
    broadcast_buffers(net)
    # Each sample is on one rank only. The ranks may have different numbers of samples, and nothing is padded.
    for batch in job.evaluation_batches(split, rank):
        images, targets, indices, _ = batch.to(device)
        with autocast(job.precision, device):
            logits = net(images)
        sums.update(logits, targets, indices)
    # Sums and counts, never means: the mean of the ranks' means is wrong if their numbers of samples differ.
    dist.all_reduce(sums.confusion)  # (6)
    dist.all_reduce(sums.sums)  # (6)
    if sums.examples and examples is not None:
        examples += sums.examples.gather()
    return sums.compute(len(split))


if __name__ == "__main__":
    from lit_mnist.cli.main import main

    sys.exit(main(engine="raw_ddp"))
