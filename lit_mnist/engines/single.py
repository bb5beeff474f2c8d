"""Plain PyTorch on one device: the reference for the other engines.

python -m lit_mnist.engines.single
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.data.batch import Batch
from lit_mnist.distributed.accumulation import accumulated_loss
from lit_mnist.distributed.precision import autocast, needs_scaler
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.profiling.timing import StepClock
from lit_mnist.training.checkpoint_manager import CheckpointManager
from lit_mnist.training.cuda_graph import GraphedPasses, GraphedUpdate, Passes
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.evaluation_loop import evaluate, load_best_weights, predict
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.recorder import MetricsRecorder, finish_experiment, make_loggers
from lit_mnist.training.schedule import make_schedule
from lit_mnist.training.state import TrainingState, net_weights


def run(job: ExperimentJob, rank: Rank) -> None:
    """Runs a job in this process."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    device = job.devices.of(rank)
    if device.type == "cuda":
        # A CUDA graph is captured on the current GPU, which is the first by default.
        torch.cuda.set_device(device)
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: the images are in memory, and the batches of an epoch are cut from them
    splits = job.splits
    train_batches = partial(job.train_batches, rank)

    # --- model
    net = job.build_net(device)

    # --- optimizer
    optimizer = make_optimizer(net, experiment.model, plan.lr)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = GradScaler(device.type, enabled=needs_scaler(job.precision))
    state = TrainingState(net, optimizer, schedule, scaler)

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
        update: GraphedUpdate | None = None
        if job.cuda_graph:
            passes = graphed = GraphedPasses(passes, net.parameters())
            if GraphedUpdate.supports(optimizer):
                clip, steps = experiment.trainer.gradient_clip_val, plan.total_steps
                update = GraphedUpdate(
                    graphed, optimizer, schedule, scaler, total_steps=steps, clip=clip, advance=schedule.step
                )
        # From here on, a signal stops the training after a step, once the checkpoint is saved.
        with STOP.deferred(), manager:
            for epoch in range(plan.position(state.step)[0], plan.epochs):
                net.train()
                batches = train_batches(epoch, state.step)
                for number, host_batch in enumerate(batches, start=batches.first):
                    batch = host_batch.to(device)
                    loss, logits = passes(batch, plan.accumulation_window(number))
                    recorder.on_batch_end(loss)
                    if not plan.ends_accumulation_window(number):
                        continue

                    if update and update.is_ready:
                        if recorder.is_logged(state.step + 1):
                            # The learning rate depends on the steps that the scaler skipped, which are read now.
                            recorder.check_finite()
                        lr = optimizer.param_groups[0]["lr"]
                        state.step += 1
                        update(recorder.finite, state.step)
                    else:
                        scaler.unscale_(optimizer)
                        recorder.on_before_optimizer_step(net.parameters())
                        if experiment.trainer.gradient_clip_val is not None:
                            nn.utils.clip_grad_norm_(net.parameters(), experiment.trainer.gradient_clip_val)
                        lr, optimizer_steps = optimizer.param_groups[0]["lr"], state.optimizer_steps
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
                        state.step += 1
                        # The schedule does not advance if the scaler skipped the step.
                        if state.optimizer_steps > optimizer_steps:
                            schedule.step()
                        else:
                            recorder.on_step_skipped(scaler)
                    recorder.on_step_end(logits, batch.targets, lr)
                    manager.on_step_end(state.step, ends_epoch=number + 1 == len(batches))

                clock.pause()
                validated = evaluate(job, rank, net, splits.validation) if plan.validates(epoch) else None
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
        test = evaluate(job, rank, net, splits.test, keep_examples=True)
    elif job.command == "validate":
        validation = evaluate(job, rank, net, splits.validation)
    elif job.command == "predict":
        assert job.predictions
        job.predictions(job, rank, predict(job, rank, net))

    # --- record
    finish_experiment(
        job, rank, weights=weights, clock=clock, trained=trained, validation=validation, test=test, loggers=loggers
    )


def _passes(
    job: ExperimentJob, device: torch.device, state: TrainingState, batch: Batch, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the forward and backward pass of a micro-batch in an accumulation window; returns loss and logits."""
    images, targets, _, rng = batch
    with autocast(job.precision, device):
        logits = state.net(images, rng)
        loss = mean_loss(logits, targets, job.experiment.model.label_smoothing)
    # The gradients of the micro-batches in a window add up to the gradient of their mean loss.
    share = accumulated_loss(loss, window, job.plan.accumulate) / job.plan.accumulate
    state.scaler.scale(share).backward()
    return loss.detach(), logits.detach()


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("single")
