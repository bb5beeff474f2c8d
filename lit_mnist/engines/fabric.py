"""Lightning Fabric: the loop is one's own, the devices, processes and precision are Fabric's.

python -m lit_mnist.engines.fabric --devices 2
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch.amp.grad_scaler import GradScaler

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.checkpoint.state import TrainingState, net_weights
from lit_mnist.distributed.rank import Rank
from lit_mnist.models.build import build_net
from lit_mnist.models.sync_batch_norm import sync_batch_norm
from lit_mnist.run.finish import finish
from lit_mnist.run.metrics_log import make_loggers
from lit_mnist.run.recorder import MetricsRecorder
from lit_mnist.run.timing import StepClock
from lit_mnist.training.ddp_arguments import DDP_OPTIONS, device_options
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.evaluation_loop import evaluate
from lit_mnist.training.examples import Example
from lit_mnist.training.job import Job
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss, make_optimizer
from lit_mnist.training.precision import weight_dtype
from lit_mnist.training.schedule import make_schedule


def run(job: Job, rank: Rank) -> None:
    """Does a job in one rank."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    fabric = _fabric(job)
    fabric.launch()
    clock = StepClock(plan.batch_size * plan.accumulate, job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: cut from memory, epoch by epoch; Fabric need not wrap it

    # --- model
    net = build_net(
        experiment.model, num_classes=job.dataset.num_classes, seed=experiment.seed_everything, weights=job.weights
    )
    net.to(fabric.device, weight_dtype(job.precision)).to(memory_format=torch.channels_last)
    if job.sync_batchnorm:
        sync_batch_norm(net, fabric.device.type, experiment.run.timeout)
    # Fabric gives a network's output back in torch's default type: without this, 64-bit logits in 32 bits.
    torch.set_default_dtype(weight_dtype(job.precision))
    model = fabric.setup_module(net)

    # --- optimizer
    optimizer = make_optimizer(net, replace(experiment.model, lr=plan.lr))
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = getattr(fabric.strategy.precision, "scaler", None) or GradScaler(fabric.device.type, enabled=False)
    state = TrainingState(net, optimizer, schedule, scaler)
    # Fabric does not report whether its scaler skipped a step: this counts the steps that the optimizer takes.
    optimizer.register_step_post_hook(lambda *_: setattr(state, "optimizer_steps", state.optimizer_steps + 1))
    fabric_optimizer = fabric.setup_optimizers(optimizer)

    # --- resume: not supported here
    def save() -> None:
        if fabric.is_global_zero:
            manager.write(state.checkpoint(job, manager.best))

    manager = CheckpointManager(job, rank, net, save)

    # --- train
    validation = None
    recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, loggers=loggers)
    for epoch in range(plan.epochs):
        _train_epoch(job, rank, epoch, fabric, model, fabric_optimizer, state, recorder)
        clock.pause()
        validated = evaluate(job, rank, net, job.splits.validation) if plan.validates(epoch) else None
        validation = validated or validation
        recorder.on_epoch_end(epoch, validated, is_best=manager.update_best(validated))
        manager.on_epoch_end(state.step, recorder.show_epoch)
    manager.wait()
    trained = recorder.close(optimizer_steps=state.optimizer_steps)
    weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}

    # --- evaluate
    test: Evaluation | None = None
    examples: list[Example] = []
    if job.command == "train":
        if fabric.is_global_zero:
            net.load_state_dict(net_weights(read_checkpoint(job.folder / "checkpoints" / BEST)))
        if plan.world_size > 1:
            for tensor in net.state_dict().values():
                torch.distributed.broadcast(tensor, src=0)
        test = evaluate(job, rank, net, job.splits.test, examples)

    # --- record
    finish(
        job,
        rank,
        device=fabric.device,
        weights=weights,
        clock=clock,
        trained=trained,
        validation=validation,
        test=test,
        examples=examples,
        loggers=loggers,
    )
    fabric.strategy.teardown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _fabric(job: Job) -> Fabric:
    kind, run = job.devices.kind, job.experiment.run
    several = job.plan.world_size > 1
    if job.precision == "64-true":
        precision: Precision = DoublePrecision()
    elif job.precision == "32-true":
        precision = Precision()
    else:
        # By itself Fabric, as the Trainer, would refuse float16 on a CPU.
        precision = MixedPrecision(job.precision, device=kind)
    strategy = DDPStrategy(
        process_group_backend="nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=run.timeout),
        **DDP_OPTIONS,
        **device_options(kind, job.plan.accumulate),
    )
    return Fabric(
        accelerator=kind,
        devices=list(job.devices.numbers) if kind == "cuda" else job.devices.count,
        num_nodes=job.plan.world_size // job.devices.count,
        strategy=strategy if several else "auto",
        # Said, since Fabric would take the variables of a Slurm job for ranks.
        plugins=[precision, TorchElasticEnvironment() if several else LightningEnvironment()],
    )


def _train_epoch(
    job: Job,
    rank: Rank,
    epoch: int,
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    state: TrainingState,
    recorder: MetricsRecorder,
) -> None:
    plan, settings, max_norm = job.plan, job.experiment.model, job.experiment.trainer.gradient_clip_val
    model.train()
    for number, batch in enumerate(job.train_batches(rank, epoch, state.step)):
        images, targets, _, draw = batch.to(fabric.device)
        steps_now = plan.ends_accumulation_window(number)
        with fabric.no_backward_sync(model, enabled=plan.world_size > 1 and not steps_now):
            logits = model(images, draw)
            loss = mean_loss(logits, targets, settings.label_smoothing)
            # Fabric scales the loss for float16, and leaves the division by the window to its user.
            fabric.backward(
                accumulated_loss(loss, plan.accumulation_window(number), plan.accumulate) / plan.accumulate, model=model
            )
        recorder.on_batch_end(loss)
        if not steps_now:
            continue

        if max_norm is not None:
            # By default Fabric raises where a gradient has overflowed, which is the scaler's affair.
            fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        rate, made = state.optimizer.param_groups[0]["lr"], state.optimizer_steps
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if state.optimizer_steps > made:
            state.schedule.step()
        else:
            recorder.on_step_skipped(state.scaler)
        recorder.on_step_end(logits, targets, rate)


if __name__ == "__main__":
    from lit_mnist.cli.main import main

    sys.exit(main(engine="fabric"))
