"""Lightning Fabric: a hand-written loop on the devices, processes and precision that Fabric sets up.

python -m lit_mnist.engines.fabric --devices 2
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS, device_options
from lit_mnist.distributed.precision import weight_dtype
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.sync_batch_norm import sync_batch_norm
from lit_mnist.plugins.lightning_messages import hide_messages
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
    hide_messages()
    fabric = _fabric(job)
    fabric.launch()
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: the batches of an epoch are cut from the images in memory, without Fabric's loaders

    # --- model
    net = job.build_net(fabric.device)
    if job.sync_batchnorm:
        sync_batch_norm(net, fabric.device.type, experiment.run.timeout)
    # Fabric converts the outputs of a network to torch's default dtype, which would round 64-bit logits.
    torch.set_default_dtype(weight_dtype(job.precision))
    model = fabric.setup_module(net)

    # --- optimizer
    optimizer = make_optimizer(net, experiment.model, plan.lr)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = getattr(fabric.strategy.precision, "scaler", None) or GradScaler(fabric.device.type, enabled=False)
    state = TrainingState(net, optimizer, schedule, scaler)
    fabric_optimizer = fabric.setup_optimizers(optimizer)

    # --- resume: not supported by this engine
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
    fabric.strategy.teardown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _fabric(job: ExperimentJob) -> Fabric:
    kind, several = job.devices.kind, job.plan.world_size > 1
    if job.precision == "64-true":
        precision: Precision = DoublePrecision()
    elif job.precision == "32-true":
        precision = Precision()
    else:
        # By default, Fabric rejects float16 on a CPU.
        precision = MixedPrecision(job.precision, device=kind)
    strategy = DDPStrategy(
        process_group_backend="nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=job.experiment.run.timeout),
        **DDP_OPTIONS,
        **device_options(kind, job.plan.accumulate),
    )
    return Fabric(
        accelerator=kind,
        devices=list(job.devices.numbers) if kind == "cuda" else job.devices.count,
        num_nodes=job.plan.world_size // job.devices.count,
        strategy=strategy if several else "auto",
        # By default, Fabric interprets the variables of a Slurm job as ranks.
        plugins=[precision, TorchElasticEnvironment() if several else LightningEnvironment()],
    )


def _train_epoch(
    job: ExperimentJob,
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
        images, targets, _, rng = batch.to(fabric.device)
        ends_window = plan.ends_accumulation_window(number)
        with fabric.no_backward_sync(model, enabled=plan.world_size > 1 and not ends_window):
            logits = model(images, rng)
            loss = mean_loss(logits, targets, settings.label_smoothing)
            # Fabric scales the loss for float16, but not for accumulation.
            fabric.backward(window_share(loss, plan, number), model=model)
        recorder.on_batch_end(loss)
        if not ends_window:
            continue

        if max_norm is not None:
            # By default, Fabric raises if a gradient has overflowed, before the scaler can skip the step.
            fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        lr, optimizer_steps = state.optimizer.param_groups[0]["lr"], state.optimizer_steps
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if state.optimizer_steps > optimizer_steps:
            state.schedule.step()
        else:
            recorder.on_step_skipped(state.scaler)
        recorder.on_step_end(logits, targets, lr)


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("fabric")
