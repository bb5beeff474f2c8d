"""The Hugging Face Trainer: the loop is the Trainer's, and every default of it that is not neutral is written down.

python -m lit_mnist.engines.with_hf_trainer --devices 2
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.amp.grad_scaler import GradScaler
from transformers import TrainerCallback, TrainingArguments

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.checkpoint.state import TrainingState, net_weights
from lit_mnist.data.loader import Batch
from lit_mnist.distributed.rank import Rank
from lit_mnist.experiment.plan import Plan
from lit_mnist.models.build import build_net
from lit_mnist.models.sync_batch_norm import sync_batch_norm
from lit_mnist.run.finish import finish
from lit_mnist.run.metrics_log import make_loggers
from lit_mnist.run.recorder import MetricsRecorder
from lit_mnist.run.timing import StepClock
from lit_mnist.training.ddp_arguments import accelerate_options
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
    # --- setup: the arguments join the process group
    experiment, plan = job.experiment, job.plan
    arguments = _arguments(job)
    device = arguments.device
    clock = StepClock(plan.batch_size * plan.accumulate, job.first_process)
    loggers = make_loggers(job, rank)

    # --- data: see _Epochs

    # --- model
    net = build_net(
        experiment.model, num_classes=job.dataset.num_classes, seed=experiment.seed_everything, weights=job.weights
    )
    net.to(device, weight_dtype(job.precision)).to(memory_format=torch.channels_last)
    if job.sync_batchnorm:
        sync_batch_norm(net, device.type, experiment.run.timeout)

    # --- optimizer
    optimizer = make_optimizer(net, replace(experiment.model, lr=plan.lr))
    schedule = make_schedule(optimizer, experiment.model, plan.total_steps)
    state = TrainingState(net, optimizer, schedule, GradScaler(device.type, enabled=False))
    # The Trainer calls its callbacks for a step that the scaler skipped, too: this counts those that were taken.
    optimizer.register_step_post_hook(lambda *_: setattr(state, "optimizer_steps", state.optimizer_steps + 1))

    # --- resume: not supported here
    def save() -> None:
        if rank.is_first:
            manager.write(state.checkpoint(job, manager.best))

    manager = CheckpointManager(job, rank, net, save)

    # --- train
    recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=net, loggers=loggers)
    report = _Report(job, rank, state, manager, recorder)
    trainer = _Trainer(
        job,
        rank,
        report,
        model=net,
        args=arguments,
        optimizers=(optimizer, schedule),
        callbacks=[report],
        # With it, the Trainer does not divide the loss of `compute_loss` by the accumulation window again.
        compute_loss_func=mean_loss,
    )
    # TrainingArguments has no word for each of them. By default unused parameters are looked for, and from three ranks
    # on the sums then have another order.
    trainer.accelerator.ddp_handler = accelerate_options(device.type, plan.accumulate)
    state.scaler = trainer.accelerator.scaler or state.scaler
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    manager.wait()
    trained = recorder.close(optimizer_steps=state.optimizer_steps)
    weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}

    # --- evaluate
    test: Evaluation | None = None
    examples: list[Example] = []
    if job.command == "train":
        if rank.is_first:
            net.load_state_dict(net_weights(read_checkpoint(job.folder / "checkpoints" / BEST)))
        if plan.world_size > 1:
            for tensor in net.state_dict().values():
                torch.distributed.broadcast(tensor, src=0)
        test = evaluate(job, rank, net, job.splits.test, examples)

    # --- record
    finish(
        job,
        rank,
        device=device,
        weights=weights,
        clock=clock,
        trained=trained,
        validation=report.validation,
        test=test,
        examples=examples,
        loggers=loggers,
    )
    trainer.accelerator.end_training()


def _arguments(job: Job) -> TrainingArguments:
    trainer, plan, several = job.experiment.trainer, job.plan, job.plan.world_size > 1
    return TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=job.devices.kind == "cpu",
        bf16=job.precision == "bf16-mixed",
        fp16=job.precision == "16-mixed",
        per_device_train_batch_size=plan.batch_size // plan.world_size,
        gradient_accumulation_steps=plan.accumulate,
        max_steps=plan.total_steps,
        # By default gradients are clipped at norm 1.
        max_grad_norm=trainer.gradient_clip_val or 0.0,
        ddp_backend=("nccl" if job.devices.kind == "cuda" else "gloo") if several else None,
        ddp_timeout=math.ceil(job.experiment.run.timeout),
        seed=job.experiment.seed_everything,
        # By default a loss that is not finite is replaced in the logs, at the price of waiting for each one.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


@dataclass(frozen=True)
class _MicroBatch:
    """A numbered micro-batch, in no container that the Trainer would take apart."""

    number: int
    batch: Batch


class _Epochs:
    """The micro-batches of one epoch after the other, as the Trainer asks for them."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self.job, self.rank, self.epoch = job, rank, 0

    def __len__(self) -> int:
        return self.job.plan.batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Takes the epoch that comes."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, _MicroBatch]]:
        step = self.epoch * self.job.plan.steps_per_epoch
        for number, batch in enumerate(self.job.train_batches(self.rank, self.epoch, step)):
            yield {"micro_batch": _MicroBatch(number, batch)}


class _Report(TrainerCallback):
    """Passes steps and epochs on to the project's own recorder, and evaluates each epoch exactly."""

    def __init__(
        self, job: Job, rank: Rank, state: TrainingState, manager: CheckpointManager, recorder: MetricsRecorder
    ) -> None:
        self.job, self.rank, self.training, self.manager, self.recorder = job, rank, state, manager, recorder
        self.validation: Evaluation | None = None
        self.logits = self.targets = torch.empty(0)
        self.rate, self.epoch, self.made = 0.0, 0, 0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Notes the learning rate of the step that comes."""
        self.rate = self.training.optimizer.param_groups[0]["lr"]
        self.made = self.training.optimizer_steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records an optimizer step."""
        self.training.step += 1
        if self.training.optimizer_steps == self.made:
            self.recorder.on_step_skipped(self.training.scaler)
        self.recorder.on_step_end(self.logits, self.targets, self.rate)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Evaluates and keeps the epoch that ends."""
        self.recorder.clock.pause()
        validated = None
        if self.job.plan.validates(self.epoch):
            validated = evaluate(self.job, self.rank, self.training.net, self.job.splits.validation)
        self.validation = validated or self.validation
        self.recorder.on_epoch_end(self.epoch, validated, is_best=self.manager.update_best(validated))
        self.manager.on_epoch_end(self.training.step, self.recorder.show_epoch)
        self.epoch += 1


class _Trainer(transformers.Trainer):
    """The Trainer with the experiment's own batches and loss."""

    def __init__(self, job: Job, rank: Rank, report: _Report, **options: Any) -> None:
        self.job, self.rank, self.report = job, rank, report
        super().__init__(**options)

    def get_train_dataloader(self) -> Any:
        """Returns the experiment's own batches; a prepared loader would be split over the ranks once more."""
        return _Epochs(self.job, self.rank)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Returns a micro-batch's share of the loss of its window."""
        plan: Plan = self.job.plan
        micro_batch: _MicroBatch = inputs["micro_batch"]
        images, targets, _indices, draw = micro_batch.batch.to(self.args.device)
        logits = model(images, draw)
        loss = mean_loss(logits, targets, self.job.experiment.model.label_smoothing)
        self.report.recorder.on_batch_end(loss)
        self.report.logits, self.report.targets = logits.detach(), targets
        return accumulated_loss(loss, plan.accumulation_window(micro_batch.number), plan.accumulate) / plan.accumulate


if __name__ == "__main__":
    from lit_mnist.cli.main import main

    sys.exit(main(engine="with_hf_trainer"))
