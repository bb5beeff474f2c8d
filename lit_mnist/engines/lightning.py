"""PyTorch Lightning: the Trainer owns the loop.

python train.py --devices 2
python -m lit_mnist.engines.lightning --devices 2
torchrun --standalone --nproc-per-node 2 -m lit_mnist.engines.lightning
"""

from __future__ import annotations

import logging
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import Callback

from lit_mnist.callbacks import KeepCheckpoints, RecordTraining, VerifiedCheckpointIO
from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.signals import STOP
from lit_mnist.module import LitClassifier
from lit_mnist.plugins._private import leave_signals_alone
from lit_mnist.run.finish import finish, write_predictions
from lit_mnist.run.recorder import MetricsRecorder
from lit_mnist.run.timing import StepClock
from lit_mnist.trainer import LitTrainer
from lit_mnist.training.job import Job
from lit_mnist.training.precision import weight_dtype


def run(job: Job, rank: Rank) -> None:
    """Does a job in one rank."""
    # --- setup
    experiment = job.experiment
    device = job.devices.of(rank)
    clock = StepClock(job.plan.batch_size * job.plan.accumulate, job.first_process)
    quieten()
    if rank.world_size > 1 and (store := rendezvous_store(rank, experiment.run.timeout)):
        # Under torchrun, whose restarts Lightning would mistake for one another; it takes the group that it finds.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=experiment.run.timeout),
        )

    # --- data
    data = MNISTDataModule.of(experiment, job.splits, job.plan)

    # --- model
    module = LitClassifier(
        num_classes=job.dataset.num_classes, seed=experiment.seed_everything, **vars(experiment.model)
    )

    if job.weights:
        module.net.load_state_dict(job.weights, strict=False)
    # Here, since the Trainer restores a checkpoint before it converts: 64-bit weights would be rounded to 32 bits.
    module.net.to(weight_dtype(job.precision))
    if job.cuda_graph:
        module.graph_passes()

    # --- optimizer: made by LitClassifier.configure_optimizers, stepped by the Trainer
    module.total_steps = job.plan.total_steps

    # --- resume: the Trainer restores weights, optimizer, schedule, scaler and its own loops
    resumed = read_checkpoint(job.checkpoint, hashed=job.trains) if job.checkpoint else None
    callbacks: list[Callback] = []
    recorder = keep = None
    if job.trains:
        step = resumed["global_step"] if resumed else 0
        recorder = MetricsRecorder(job=job, rank=rank, clock=clock, net=module.net, step=step)
        keep = KeepCheckpoints(job, recorder)
        callbacks = [RecordTraining(recorder), keep]
    trainer = _trainer(job, callbacks, keep.manager if keep else None)

    # --- train
    trained = None
    if recorder and keep:
        # From here on a signal is obeyed between two steps, by all ranks together, once the training is saved.
        with STOP.deferred(), keep.manager:
            trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
        early = trainer.global_step < job.plan.total_steps
        trained = recorder.close(
            optimizer_steps=module.optimizer_steps, stopped_early=_reason_to_stop(trainer) if early else None
        )
    elif resumed:
        module.load_state_dict(resumed["state_dict"])
    weights = {name: tensor.detach().cpu().clone() for name, tensor in module.net.state_dict().items()}

    # --- evaluate
    if job.command == "train":
        # The Trainer has moved the module to the CPU, from where NCCL sends nothing.
        _take_weights(module.to(device), job.folder / "checkpoints" / BEST, rank)
    if job.command in {"train", "test"}:
        trainer.test(module, datamodule=data, verbose=False)
    elif job.command == "validate":
        trainer.validate(module, datamodule=data, verbose=False)
    elif job.command == "predict":
        write_predictions(job, rank, cast(list[Any], trainer.predict(module, datamodule=data)))

    # --- record
    finish(
        job,
        rank,
        device=device,
        weights=weights,
        clock=clock,
        trained=trained,
        validation=module.validation,
        test=module.tested,
        examples=module.examples,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def _trainer(job: Job, callbacks: list[Callback], manager: CheckpointManager | None) -> LitTrainer:
    settings = job.experiment.trainer
    extras = job.extras() if job.extras else {}
    own = extras.pop("callbacks", [])
    trainer = LitTrainer(
        # The plan has worked max_steps into the length of the epochs: the Trainer asks for each.
        max_epochs=job.plan.epochs,
        reload_dataloaders_every_n_epochs=1,
        precision=job.precision,
        sync_batchnorm=settings.sync_batchnorm,
        accelerator="gpu" if job.devices.kind == "cuda" else "cpu",
        devices=list(job.devices.numbers) if job.devices.kind == "cuda" else job.devices.count,
        num_nodes=job.plan.world_size // job.devices.count,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        deterministic=settings.deterministic,
        timeout=job.experiment.run.timeout,
        callbacks=[*callbacks, *(own if isinstance(own, list) else [own])],
        plugins=[VerifiedCheckpointIO(manager)],
        logger=False,
        limit_val_batches=1.0 if len(job.splits.validation) else 0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **extras,
    )
    leave_signals_alone(trainer)
    return trainer


def _reason_to_stop(trainer: LitTrainer) -> str:
    """Returns why a callback has ended a training."""
    for callback in trainer.early_stopping_callbacks:
        if message := callback.stopping_reason_message:
            return str(message).removeprefix("Monitored metric ").removesuffix(" Signaling Trainer to stop.")
    return "a callback asked for it."


def _take_weights(module: LitClassifier, path: Path, rank: Rank) -> None:
    """Gives every rank the weights of a checkpoint that rank 0 alone needs to be able to read."""
    if rank.is_first:
        module.load_state_dict(read_checkpoint(path)["state_dict"])
    if rank.world_size > 1:
        for tensor in module.net.state_dict().values():
            dist.broadcast(tensor, src=0)


def quieten() -> None:
    """Leaves out what Lightning says of every run; warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Said of Lightning's own call into torch.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")


if __name__ == "__main__":
    from lit_mnist.cli.main import main

    sys.exit(main(engine="lightning"))
