"""The Hugging Face Trainer owns the loop; each of its defaults that changes the training is set explicitly.

python -m lit_mnist.engines.with_hf_trainer --devices 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.amp.grad_scaler import GradScaler
from transformers import TrainerCallback, TrainingArguments

from lit_mnist.data.loader import Batch
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
    # --- setup: TrainingArguments joins the process group
    experiment, plan = job.experiment, job.plan
    arguments = _arguments(job)
    device = arguments.device
    clock = StepClock(job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: see _EpochLoader

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
    recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, loggers=loggers)
    callback = _RecorderCallback(job, rank, state, manager, recorder)
    trainer = _Trainer(
        job,
        rank,
        callback,
        model=net,
        args=arguments,
        optimizers=(optimizer, schedule),
        callbacks=[callback],
        # With this argument, the Trainer does not divide the result of `compute_loss` by the accumulation window.
        compute_loss_func=mean_loss,
    )
    # TrainingArguments cannot express all of them. By default, DDP searches for unused parameters, which changes the
    # order of the sums with three or more ranks.
    trainer.accelerator.ddp_handler = accelerate_options(device.type, plan.accumulate)
    state.scaler = trainer.accelerator.scaler or state.scaler
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    manager.wait()
    validation = callback.validation
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
    trainer.accelerator.end_training()


def _arguments(job: ExperimentJob) -> TrainingArguments:
    trainer, plan, several = job.experiment.trainer, job.plan, job.plan.world_size > 1
    return TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=job.devices.kind == "cpu",
        bf16=job.precision == "bf16-mixed",
        fp16=job.precision == "16-mixed",
        per_device_train_batch_size=plan.batch_size // plan.world_size,
        gradient_accumulation_steps=plan.accumulate,
        max_steps=plan.total_steps,
        # The default clips gradients at norm 1.
        max_grad_norm=trainer.gradient_clip_val or 0.0,
        ddp_backend=("nccl" if job.devices.kind == "cuda" else "gloo") if several else None,
        ddp_timeout=math.ceil(job.experiment.run.timeout),
        seed=job.experiment.seed_everything,
        # The default replaces losses that are not finite in the logs, and waits for the device in each step.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


@dataclass(frozen=True)
class _MicroBatch:
    """A micro-batch and its index in the epoch, in a class that the Trainer does not convert."""

    number: int
    batch: Batch


class _EpochLoader:
    """The micro-batches of the current epoch."""

    def __init__(self, job: ExperimentJob, rank: Rank) -> None:
        self.job, self.rank, self.epoch = job, rank, 0

    def __len__(self) -> int:
        return self.job.plan.batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, _MicroBatch]]:
        step = self.epoch * self.job.plan.steps_per_epoch
        for number, batch in enumerate(self.job.train_batches(self.rank, self.epoch, step)):
            yield {"micro_batch": _MicroBatch(number, batch)}


class _RecorderCallback(TrainerCallback):
    """Records steps and epochs, evaluates, and saves."""

    def __init__(
        self,
        job: ExperimentJob,
        rank: Rank,
        state: TrainingState,
        manager: CheckpointManager,
        recorder: MetricsRecorder,
    ) -> None:
        self.job, self.rank, self.training, self.manager, self.recorder = job, rank, state, manager, recorder
        self.validation: Evaluation | None = None
        self.logits = self.targets = torch.empty(0)
        self.lr, self.epoch, self.optimizer_steps = 0.0, 0, 0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stores the state before the step."""
        self.lr = self.training.optimizer.param_groups[0]["lr"]
        self.optimizer_steps = self.training.optimizer_steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records an optimizer step."""
        self.training.step += 1
        if self.training.optimizer_steps == self.optimizer_steps:
            self.recorder.on_step_skipped(self.training.scaler)
        self.recorder.on_step_end(self.logits, self.targets, self.lr)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Validates and saves."""
        self.recorder.clock.pause()
        validated = None
        if self.job.plan.validates(self.epoch):
            validated = evaluate(self.job, self.rank, self.training.net, self.job.splits.validation)
        self.validation = validated or self.validation
        self.recorder.on_epoch_end(self.epoch, validated, is_best=self.manager.update_best(validated))
        self.manager.on_epoch_end(self.training.step, self.recorder.show_epoch)
        self.epoch += 1


class _Trainer(transformers.Trainer):
    """A Trainer with the batches and the loss of the experiment."""

    def __init__(self, job: ExperimentJob, rank: Rank, callback: _RecorderCallback, **options: Any) -> None:
        self.job, self.rank, self.callback = job, rank, callback
        super().__init__(**options)

    def get_train_dataloader(self) -> Any:
        """Returns the batches of this rank; the Trainer would split a DataLoader over the ranks again."""
        return _EpochLoader(self.job, self.rank)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Returns the share of a micro-batch in the loss of its accumulation window."""
        micro_batch: _MicroBatch = inputs["micro_batch"]
        images, targets, _indices, rng = micro_batch.batch.to(self.args.device)
        logits = model(images, rng)
        loss = mean_loss(logits, targets, self.job.experiment.model.label_smoothing)
        self.callback.recorder.on_batch_end(loss)
        self.callback.logits, self.callback.targets = logits.detach(), targets
        return window_share(loss, self.job.plan, micro_batch.number)


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("with_hf_trainer")
