"""Synchronous parameter servers, which distributed training used before all-reduce.

    python -m lit_mnist.engines.parameter_server --devices 4 --servers 2

Every rank is a worker. The first K ranks are also servers, each of which owns a slice of the gradient. In each step,
every worker sends each server its slice; the server waits for all workers, and sends the mean back. This is the
synchronous form of DistBelief (Dean et al.: Large Scale Distributed Deep Networks, 2012). The traffic of a server grows
with the number of workers; that of a rank in an all-reduce does not.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.precision import autocast
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.sync_batch_norm import sync_batch_norm
from lit_mnist.profiling.timing import StepClock
from lit_mnist.training.accumulation import window_share
from lit_mnist.training.checkpoint_manager import CheckpointManager
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.evaluation_loop import evaluate, load_best_weights
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.recorder import MetricsRecorder, finish_experiment, make_loggers
from lit_mnist.training.schedule import make_schedule
from lit_mnist.training.state import TrainingState


def run(job: ExperimentJob, rank: Rank) -> None:
    """Runs a job in one rank."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    device = job.devices.of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous_store(rank, experiment.run.timeout),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=experiment.run.timeout),
    )
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: the batches of an epoch are cut from the images in memory

    # --- model
    net = job.build_net(device)
    if job.sync_batchnorm:
        sync_batch_norm(net, device.type, experiment.run.timeout)

    # --- optimizer
    optimizer = make_optimizer(net, experiment.model, plan.lr)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    state = TrainingState(net, optimizer, schedule, GradScaler(device.type, enabled=False))

    # --- resume: not supported by this engine
    def save() -> None:
        if rank.is_first:
            manager.write(state.checkpoint(job, manager.best))

    manager = CheckpointManager(job, rank, net, save)

    # --- train
    validation = None
    recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, loggers=loggers)
    for epoch in range(plan.epochs):
        _train_epoch(job, rank, epoch, state, recorder)
        clock.pause()
        validated = evaluate(job, rank, net, job.splits.validation) if plan.validates(epoch) else None
        validation = validated or validation
        recorder.on_epoch_end(epoch, validated, is_best=manager.update_best(validated))
        manager.on_epoch_end(state.step, recorder.show_epoch)
    manager.wait()
    trained = recorder.end_training(optimizer_steps=state.optimizer_steps)
    weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}

    # --- evaluate
    test: Evaluation | None = None
    if job.command == "train":
        load_best_weights(job, rank, net)
        test = evaluate(job, rank, net, job.splits.test, keep_examples=True)

    # --- record
    finish_experiment(
        job, rank, weights=weights, clock=clock, trained=trained, validation=validation, test=test, loggers=loggers
    )
    dist.destroy_process_group()


def _train_epoch(job: ExperimentJob, rank: Rank, epoch: int, state: TrainingState, recorder: MetricsRecorder) -> None:
    plan, settings, device = job.plan, job.experiment.model, job.devices.of(rank)
    net, optimizer, max_norm = state.net, state.optimizer, job.experiment.trainer.gradient_clip_val
    parameters = list(net.parameters())
    net.train()
    for number, batch in enumerate(job.train_batches(rank, epoch, state.step)):
        images, targets, _, rng = batch.to(device)
        with autocast(job.precision, device):
            logits = net(images, rng)
            loss = mean_loss(logits, targets, settings.label_smoothing)
        (window_share(loss, plan, number)).backward()
        recorder.on_batch_end(loss)
        if not plan.ends_accumulation_window(number):
            continue

        gradient = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
        average_by_servers(gradient, rank, servers=job.experiment.run.servers)
        parts = gradient.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.schedule.step()
        recorder.on_step_end(logits, targets, lr)


def average_by_servers(vector: torch.Tensor, rank: Rank, servers: int) -> None:
    """Replaces a vector by its mean over the ranks; every rank must call it.

    Args:
        vector: The vector of this rank, floating point [n], of the same length on all ranks.
        rank: This rank.
        servers: Number of servers; rank k averages the k-th slice.
    """
    slices = vector.tensor_split(servers)
    others = [other for other in range(rank.world_size) if other != rank.rank]
    owned = slices[rank.rank] if rank.rank < servers else None
    received = {other: torch.empty_like(owned) for other in others} if owned is not None else {}

    # Each worker sends each server its slice.
    transfers = [dist.P2POp(dist.isend, part, server) for server, part in enumerate(slices) if server != rank.rank]
    transfers += [dist.P2POp(dist.irecv, part, other) for other, part in received.items()]
    _transfer(transfers)

    # Each server sums in the order of the ranks, whichever arrives first, and sends the mean to all.
    transfers = []
    if owned is not None:
        parts = [received[other] if other != rank.rank else owned for other in range(rank.world_size)]
        owned.copy_(torch.stack(parts).sum(dim=0) / rank.world_size)
        transfers += [dist.P2POp(dist.isend, owned, other) for other in others]
    transfers += [dist.P2POp(dist.irecv, part, server) for server, part in enumerate(slices) if server != rank.rank]
    _transfer(transfers)


def _transfer(transfers: list[dist.P2POp]) -> None:
    # As one batch, so that no two ranks wait for each other.
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("parameter_server")
