"""nn.DataParallel: one process with a thread per GPU, which copies the network to all GPUs in each step.

    python -m lit_mnist.engines.data_parallel --devices 2

It needs at least two GPUs. Batch norm uses the statistics of each GPU alone, and keeps the running statistics of the
first GPU. Networks with batch norm therefore get other weights than from the other engines.
"""

from __future__ import annotations

from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.precision import autocast, needs_scaler
from lit_mnist.distributed.rank import Rank
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
    """Runs a job in this process, on all its GPUs."""
    # --- setup
    experiment, plan = job.experiment, job.plan
    device = job.devices.of(rank)
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: whole batches, which DataParallel splits

    # --- model
    net = job.build_net(device)
    model = nn.DataParallel(net, device_ids=list(job.devices.numbers))

    # --- optimizer
    optimizer = make_optimizer(net, experiment.model, plan.lr)
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    scaler = GradScaler(device.type, enabled=needs_scaler(job.precision))
    state = TrainingState(net, optimizer, schedule, scaler)

    # --- resume: not supported by this engine
    def save() -> None:
        manager.write(state.checkpoint(job, manager.best))

    manager = CheckpointManager(job, rank, net, save)

    # --- train
    validation = None
    recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, loggers=loggers)
    for epoch in range(plan.epochs):
        _train_epoch(job, rank, epoch, model, state, recorder)
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


def _train_epoch(
    job: ExperimentJob,
    rank: Rank,
    epoch: int,
    model: nn.DataParallel[nn.Module],
    state: TrainingState,
    recorder: MetricsRecorder,
) -> None:
    plan, settings, device = job.plan, job.experiment.model, job.devices.of(rank)
    optimizer, scaler, max_norm = state.optimizer, state.scaler, job.experiment.trainer.gradient_clip_val
    model.train()
    for number, batch in enumerate(job.train_batches(rank, epoch, state.step)):
        images, targets, _, rng = batch.to(device)
        with autocast(job.precision, device):
            logits = model(images, rng)
            loss = mean_loss(logits, targets, settings.label_smoothing)
        scaler.scale(window_share(loss, plan, number)).backward()
        recorder.on_batch_end(loss)
        if not plan.ends_accumulation_window(number):
            continue

        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        lr, optimizer_steps = optimizer.param_groups[0]["lr"], state.optimizer_steps
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state.step += 1
        if state.optimizer_steps > optimizer_steps:
            state.schedule.step()
        else:
            recorder.on_step_skipped(scaler)
        recorder.on_step_end(logits, targets, lr)


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("data_parallel")
