"""Plain PyTorch on one device, without any distribution: what every other engine is compared with.

python -m lit_mnist.engines.single
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.checkpoint.state import TrainingState, net_weights
from lit_mnist.data.batch import Batch
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.models.build import build_net
from lit_mnist.run.finish import finish, write_predictions
from lit_mnist.run.metrics_log import make_loggers
from lit_mnist.run.recorder import MetricsRecorder
from lit_mnist.run.timing import StepClock
from lit_mnist.training.cuda_graph import GraphedPasses, Passes
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.evaluation_loop import evaluate, predict
from lit_mnist.training.examples import Example
from lit_mnist.training.job import Job
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss, make_optimizer
from lit_mnist.training.precision import autocast, needs_scaler, weight_dtype
from lit_mnist.training.schedule import make_schedule


def run(job: Job, rank: Rank) -> None:
    """Does a job in this process."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    device = job.devices.of(rank)
    if device.type == "cuda":
        # A graph is recorded on the current GPU, which by itself is the first.
        torch.cuda.set_device(device)
    clock = StepClock(plan.batch_size * plan.accumulate, job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: cut from memory, epoch by epoch

    # --- model
    net = build_net(
        experiment.model, num_classes=job.dataset.num_classes, seed=experiment.seed_everything, weights=job.weights
    )
    net.to(device, weight_dtype(job.precision)).to(memory_format=torch.channels_last)

    # --- optimizer
    optimizer = make_optimizer(net, replace(experiment.model, lr=plan.lr))
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = GradScaler(device.type, enabled=needs_scaler(job.precision))
    state = TrainingState(net, optimizer, schedule, scaler)
    # The scaler skips a step whose gradient overflowed: this counts the steps that the optimizer takes.
    optimizer.register_step_post_hook(lambda *_: setattr(state, "optimizer_steps", state.optimizer_steps + 1))

    # --- resume
    best = None
    if job.checkpoint and job.trains:
        best = state.restore(read_checkpoint(job.checkpoint))
    elif job.checkpoint:
        net.load_state_dict(net_weights(read_checkpoint(job.checkpoint, hashed=False)))

    # --- train
    trained = validation = None
    if job.trains:

        def save() -> None:
            manager.write(state.checkpoint(job, manager.best))

        recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, step=state.step, loggers=loggers)
        manager = CheckpointManager(job, rank, net, save, step=state.step, check_finite=recorder.check_finite)
        if best is not None:
            manager.resume(best)
        passes: Passes = partial(_passes, job, device, state)
        if job.cuda_graph:
            passes = GraphedPasses(passes, net.parameters())
        # From here on a signal is obeyed between two steps, once the training is saved.
        with STOP.deferred(), manager:
            for epoch in range(plan.position(state.step)[0], plan.epochs):
                _train_epoch(job, rank, epoch, passes, state, manager, recorder)
                clock.pause()
                validated = evaluate(job, rank, net, job.splits.validation) if plan.validates(epoch) else None
                validation = validated or validation
                recorder.on_epoch_end(epoch, validated, is_best=manager.update_best(validated))
                manager.on_epoch_end(state.step, recorder.show_epoch)
        trained = recorder.close(optimizer_steps=state.optimizer_steps)
    weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}

    # --- evaluate
    test: Evaluation | None = None
    examples: list[Example] = []
    if job.command == "train":
        net.load_state_dict(net_weights(read_checkpoint(job.folder / "checkpoints" / BEST)))
    if job.command in {"train", "test"}:
        test = evaluate(job, rank, net, job.splits.test, examples)
    elif job.command == "validate":
        validation = evaluate(job, rank, net, job.splits.validation)
    elif job.command == "predict":
        write_predictions(job, rank, predict(job, rank, net))

    # --- record
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


def _passes(
    job: Job, device: torch.device, state: TrainingState, batch: Batch, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the forward and backward pass of a micro-batch, one of `window` in its step; returns loss and logits."""
    images, targets, _, draw = batch
    with autocast(job.precision, device):
        logits = state.net(images, draw)
        loss = mean_loss(logits, targets, job.experiment.model.label_smoothing)
    # A window of several micro-batches is a mean over their samples: each adds its part of the gradient.
    share = accumulated_loss(loss, window, job.plan.accumulate) / job.plan.accumulate
    state.scaler.scale(share).backward()
    return loss.detach(), logits.detach()


def _train_epoch(
    job: Job,
    rank: Rank,
    epoch: int,
    passes: Passes,
    state: TrainingState,
    manager: CheckpointManager,
    recorder: MetricsRecorder,
) -> None:
    plan, device = job.plan, job.devices.of(rank)
    net, optimizer, scaler = state.net.train(), state.optimizer, state.scaler
    parameters, max_norm = list(net.parameters()), job.experiment.trainer.gradient_clip_val

    batches = job.train_batches(rank, epoch, state.step)
    for number, made in enumerate(batches, start=batches.first):
        batch = made.to(device)
        loss, logits = passes(batch, plan.accumulation_window(number))
        recorder.on_batch_end(loss)
        if not plan.ends_accumulation_window(number):
            continue

        scaler.unscale_(optimizer)
        recorder.on_before_optimizer_step(parameters)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        rate, optimizer_steps = optimizer.param_groups[0]["lr"], state.optimizer_steps
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state.step += 1
        # The schedule waits where the scaler left the step out.
        if state.optimizer_steps > optimizer_steps:
            state.schedule.step()
        else:
            recorder.on_step_skipped(scaler)
        recorder.on_step_end(logits, batch.targets, rate)
        manager.on_step_end(state.step, ends_epoch=number + 1 == len(batches))


if __name__ == "__main__":
    from lit_mnist.cli.main import main

    sys.exit(main(engine="single"))
