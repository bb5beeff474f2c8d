"""Hugging Face Accelerate: a hand-written loop that Accelerate adapts to the devices it was launched on.

    python -m lit_mnist.engines.with_accelerate --devices 2
    torchrun --standalone --nproc-per-node 2 -m lit_mnist.engines.with_accelerate
    accelerate launch --multi_gpu --num_processes 2 -m lit_mnist.engines.with_accelerate

On CPUs, `accelerate launch --num_processes 2` silently starts one process; the engine rejects that.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.ddp_arguments import accelerate_options
from lit_mnist.distributed.rank import Rank
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
    mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
    accelerator = Accelerator(
        cpu=job.devices.kind == "cpu",
        mixed_precision=mixed.get(job.precision, "no"),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=experiment.run.timeout))],
    )
    accelerator.ddp_handler = accelerate_options(job.devices.kind, plan.accumulate)
    device = accelerator.device
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: cut from the images in memory; Accelerate would split a prepared loader over the ranks again

    # --- model
    net = job.build_net(device)
    if job.sync_batchnorm:
        sync_batch_norm(net, device.type, experiment.run.timeout)
    model = accelerator.prepare_model(net)

    # --- optimizer: the schedule is not prepared, because Accelerate would step it once per rank
    optimizer = make_optimizer(net, experiment.model, plan.lr)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = accelerator.scaler or GradScaler(device.type, enabled=False)
    state = TrainingState(net, optimizer, schedule, scaler)
    prepared_optimizer = accelerator.prepare_optimizer(optimizer)

    # --- resume: not supported by this engine
    def save() -> None:
        if accelerator.is_main_process:
            manager.write(state.checkpoint(job, manager.best))

    manager = CheckpointManager(job, rank, net, save)

    # --- train
    validation = None
    recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, loggers=loggers)
    for epoch in range(plan.epochs):
        _train_epoch(job, rank, epoch, accelerator, model, prepared_optimizer, state, recorder)
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
    accelerator.end_training()


def _train_epoch(
    job: ExperimentJob,
    rank: Rank,
    epoch: int,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    state: TrainingState,
    recorder: MetricsRecorder,
) -> None:
    plan, settings, max_norm = job.plan, job.experiment.model, job.experiment.trainer.gradient_clip_val
    model.train()
    for number, batch in enumerate(job.train_batches(rank, epoch, state.step)):
        images, targets, _, rng = batch.to(accelerator.device)
        ends_window = plan.ends_accumulation_window(number)
        # `accelerator.accumulate` counts micro-batches, and knows the epoch's end from prepared loaders only.
        with nullcontext() if ends_window else accelerator.no_sync(model):
            logits = model(images, rng)
            loss = mean_loss(logits, targets, settings.label_smoothing)
            accelerator.backward(window_share(loss, plan, number))
        recorder.on_batch_end(loss)
        if not ends_window:
            continue

        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        lr = state.optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if not accelerator.optimizer_step_was_skipped:
            state.schedule.step()
        else:
            recorder.on_step_skipped(state.scaler)
        recorder.on_step_end(logits, targets, lr)


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("with_accelerate")
