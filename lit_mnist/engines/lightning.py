"""PyTorch Lightning: the Trainer runs the loop.

python train.py --devices 2
python -m lit_mnist.engines.lightning --devices 2
torchrun --standalone --nproc-per-node 2 -m lit_mnist.engines.lightning
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ProgressBar, Timer

from lit_mnist.callbacks import RunCheckpoint, RunCheckpointIO, RunLogger, RunProgressBar, StepMonitorCallback
from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.data.loader import Batch
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.distributed.failure import RANK_STATUS
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.signals import STOP
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.lightning_internals import disable_signal_handling
from lit_mnist.run.finish import finish, load_best_weights, write_predictions
from lit_mnist.run.metrics_log import MetricsLog
from lit_mnist.run.progress import ProgressDisplay
from lit_mnist.run.recorder import StepMonitor
from lit_mnist.run.timing import StepClock
from lit_mnist.trainer import LitTrainer, silence_lightning
from lit_mnist.training.cuda_graph import GraphedPasses
from lit_mnist.training.evaluation import VALIDATION_METRICS
from lit_mnist.training.job import Job
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss
from lit_mnist.training.precision import weight_dtype


def run(job: Job, rank: Rank) -> None:
    """Runs a job in one rank."""
    # --- setup
    experiment = job.experiment
    device = job.devices.of(rank)
    clock = StepClock(job.plan.batch_size * job.plan.accumulate, job.first_process)
    silence_lightning()
    # The first and the last step are always logged.
    warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
    if rank.world_size > 1 and (store := rendezvous_store(rank, experiment.run.timeout)):
        # Under torchrun, Lightning would confuse the process groups of restarts. It uses an existing group.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=experiment.run.timeout),
        )

    # --- data
    data = MNISTDataModule.from_splits(experiment, job.splits, job.plan)

    # --- model
    kind = GraphedClassifier if job.cuda_graph else LitClassifier
    module = kind(num_classes=job.dataset.num_classes, seed=experiment.seed_everything, **vars(experiment.model))
    if job.weights:
        module.net.load_state_dict(job.weights, strict=False)
    # The Trainer restores a checkpoint before it converts the weights, which would round 64-bit weights to 32 bits.
    module.net.to(weight_dtype(job.precision))

    # --- optimizer: created by LitClassifier.configure_optimizers
    module.total_steps = job.plan.total_steps

    # --- resume: the Trainer restores weights, optimizer, schedule, scaler and loops
    resumed = read_checkpoint(job.checkpoint, hashed=job.trains) if job.checkpoint else None

    # --- train
    trained = validation = test = None
    if job.trains:
        step = resumed["global_step"] if resumed else 0
        monitor = StepMonitor(job=job, rank=rank, clock=clock, net=module.net, step=step)
        save = RunCheckpoint(job, monitor)
        trainer = _trainer(job, rank, monitor, save)
        # From here on, a signal stops all ranks after the same step, once the checkpoint is saved.
        with STOP.deferred(), save.manager:
            trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
        early = _reason_to_stop(trainer) if trainer.global_step < job.plan.total_steps else None
        trained = monitor.close(optimizer_steps=module.optimizer_steps, stopped_early=early)
        validation = module.evaluation
    else:
        trainer = _trainer(job, rank)
        if resumed:
            module.load_state_dict(resumed["state_dict"])
    weights = {name: tensor.detach().cpu().clone() for name, tensor in module.net.state_dict().items()}

    # --- evaluate
    if job.command == "train":
        # The Trainer has moved the module to the CPU, where NCCL cannot broadcast.
        load_best_weights(job, rank, module.to(device).net)
    if job.command in {"train", "test"}:
        trainer.test(module, datamodule=data, verbose=False)
        assert module.evaluation
        test = replace(module.evaluation, examples=module.examples.gather())
    elif job.command == "validate":
        trainer.validate(module, datamodule=data, verbose=False)
        assert module.evaluation
        validation = module.evaluation
    elif job.command == "predict":
        write_predictions(job, rank, cast(list[Any], trainer.predict(module, datamodule=data)))

    # --- record
    finish(job, rank, weights=weights, clock=clock, trained=trained, validation=validation, test=test)
    if dist.is_initialized():
        dist.destroy_process_group()


def _trainer(job: Job, rank: Rank, monitor: StepMonitor | None = None, save: RunCheckpoint | None = None) -> LitTrainer:
    """Returns the Trainer, with callbacks and loggers if the job trains."""
    settings = job.experiment.trainer
    extras = dict(job.extras()) if job.extras else {}
    callbacks, loggers = _as_list(extras.pop("callbacks", None)), _as_list(extras.pop("logger", None))
    if monitor and save:
        log = MetricsLog(job.folder, monitor.step, VALIDATION_METRICS) if rank.is_first else None
        loggers.insert(0, RunLogger(log, monitor))
        callbacks = [StepMonitorCallback(monitor), *callbacks, save]
        if settings.enable_progress_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            if rank.is_first:
                monitor.display = ProgressDisplay(job.plan.total_steps, monitor.step)
                RANK_STATUS.clear_display = monitor.display.clear
            callbacks.append(RunProgressBar(monitor.display, monitor))
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "enable_model_summary": False, **extras}
    trainer = LitTrainer(
        # `max_steps` and the limits are part of the plan: they shorten the loader of each epoch.
        max_epochs=job.plan.epochs,
        reload_dataloaders_every_n_epochs=1,
        check_val_every_n_epoch=job.plan.validate_every or 1,
        limit_val_batches=1.0 if job.plan.validate_every or not job.trains else 0,
        log_every_n_steps=settings.log_every_n_steps,
        precision=job.precision,
        sync_batchnorm=settings.sync_batchnorm,
        accelerator="gpu" if job.devices.kind == "cuda" else "cpu",
        devices=list(job.devices.numbers) if job.devices.kind == "cuda" else job.devices.count,
        num_nodes=job.plan.world_size // job.devices.count,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        deterministic=settings.deterministic or None,
        timeout=job.experiment.run.timeout,
        default_root_dir=job.folder,
        callbacks=callbacks,
        plugins=[RunCheckpointIO(save.manager.write if save else None)],
        logger=loggers,
        enable_checkpointing=save is not None,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        **options,
    )
    disable_signal_handling(trainer)
    return trainer


def _as_list(value: Any) -> list[Any]:
    """Converts an option to a list of objects; it may be an object, a list, a boolean or None."""
    return list(value) if isinstance(value, list) else [] if value is None or isinstance(value, bool) else [value]


def _reason_to_stop(trainer: LitTrainer) -> str:
    """Returns why a callback stopped the training."""
    for callback in trainer.early_stopping_callbacks:
        if message := callback.stopping_reason_message:
            return str(message).removeprefix("Monitored metric ").removesuffix(" Signaling Trainer to stop.")
    for timer in trainer.callbacks:  # type: ignore[attr-defined] # Lightning sets it elsewhere
        if isinstance(timer, Timer) and timer.time_remaining() is not None:
            return f"trainer.max_time is over after {timer.time_elapsed():.0f} s."
    return "a callback asked for it."


class GraphedClassifier(LitClassifier):
    """A classifier whose passes run as a CUDA graph, on one GPU without accumulation, with bit-identical weights."""

    @cached_property
    def _graphed(self) -> GraphedPasses:
        return GraphedPasses(self._passes, self.net.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        """Runs the forward and backward pass of a micro-batch, and returns its loss and its logits."""
        loss, logits = self._graphed(batch)
        self.log_training(loss, logits, batch.targets, batch_idx)
        return {"loss": loss, "logits": logits}

    def _passes(self, batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch.images, batch.rng)
        loss = mean_loss(logits, batch.targets, self.settings.label_smoothing)
        weighted = accumulated_loss(loss, window, 1)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # Lightning runs the training step under autocast; the backward pass must not be.
        with torch.autocast(loss.device.type, enabled=False):
            (scaler.scale(weighted) if scaler else weighted).backward()
        return loss.detach(), logits.detach()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Restores the gradients, which `training_step` has already computed."""
        self._graphed.restore_gradients()


if __name__ == "__main__":
    from lit_mnist.cli.main import main

    sys.exit(main(engine="lightning"))
