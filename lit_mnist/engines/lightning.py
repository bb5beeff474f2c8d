"""PyTorch Lightning: the Trainer runs the loop, for the experiment and for a user's LightningModule.

python train.py --devices 2
python -m lit_mnist.engines.lightning --devices 2
torchrun --standalone --nproc-per-node 2 -m lit_mnist.engines.lightning
lit-mnist fit --config mine.yaml --import my_package --devices 2
"""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_mnist.checkpoint.format import BEST, LAST, read_checkpoint
from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import InputError
from lit_mnist.plugins.lightning_internals import disable_signal_handling
from lit_mnist.plugins.lightning_messages import hide_messages, write_beside_the_bar
from lit_mnist.plugins.recording.checkpoint import RunCheckpoint
from lit_mnist.plugins.recording.logger import RunLogger
from lit_mnist.plugins.recording.monitor import StepMonitorCallback
from lit_mnist.plugins.recording.predictions import WritePredictions
from lit_mnist.plugins.recording.progress import RunProgressBar
from lit_mnist.plugins.recording.results import evaluation_examples, evaluation_results
from lit_mnist.profiling.timing import StepClock
from lit_mnist.run.finish import finish
from lit_mnist.run.job import Job, Parts
from lit_mnist.run.outcome import Outcome
from lit_mnist.trainer import LitTrainer

_EVALUATIONS = ("test", "predict")


def run(job: Job, rank: Rank) -> None:
    """Runs a job in one rank.

    Raises:
        InputError: Lightning rejects the module, its data or an option.
    """
    try:
        _run(job, rank)
    except MisconfigurationException as error:
        raise InputError(f"Lightning rejects the run: {' '.join(str(error).split())}") from error


def _run(job: Job, rank: Rank) -> None:
    # --- setup
    device = job.devices.of(rank)
    hide_messages()
    write_beside_the_bar()
    if rank.world_size > 1 and (store := rendezvous_store(rank, job.run.timeout)):
        # Under torchrun, Lightning would confuse the process groups of restarts. It uses an existing group.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=job.run.timeout),
        )
    clock = StepClock(job.first_process)

    # --- data and model: the same on all ranks
    seed_everything(job.seed, workers=True, verbose=False)
    assert job.make
    parts = job.make(job)
    module, data = parts.module, parts.data

    # --- optimizer: created by the module's configure_optimizers

    # --- resume and train: the Trainer restores weights, optimizer, schedule, scaler and loops
    outcome = Outcome({}, clock, evaluations=[name for name in _EVALUATIONS if _has(name, module, data)])
    if job.trains:
        trainer = _fit(job, rank, parts, outcome)
    else:
        writes = [WritePredictions(job.folder)] if _writes_outputs(job) else []
        trainer = _trainer(job, parts, [*writes, *([bar] if (bar := _bar(parts)) else [])])
        assert job.checkpoint
        _load(module, read_checkpoint(job.checkpoint, hashed=False), str(job.checkpoint))
    state = parts.network.state_dict().items()
    outcome.weights = {name: each.detach().cpu().clone() for name, each in state if isinstance(each, torch.Tensor)}

    # --- evaluate
    if job.command == "train" and "test" in outcome.evaluations:
        _load_best(job, rank, trainer, module.to(device))
    if job.command == "test" or (job.command == "train" and "test" in outcome.evaluations):
        metrics = _merged(trainer.test(module, datamodule=data, verbose=False, weights_only=True))
        outcome.test = job.note_partial(evaluation_results(module, metrics), "test")
        outcome.examples = evaluation_examples(trainer) if metrics else ()
        outcome.add_inexact(trainer.inexact_evaluation)
    elif job.command == "validate":
        metrics = _merged(trainer.validate(module, datamodule=data, verbose=False, weights_only=True))
        outcome.validation = job.note_partial(evaluation_results(module, metrics), "val")
        outcome.add_inexact(trainer.inexact_evaluation)
    elif job.command == "predict":
        outputs = trainer.predict(
            module, datamodule=data, weights_only=True, return_predictions=not _writes_outputs(job)
        )
        if job.predictions and outputs is not None:
            job.predictions(job, rank, outputs)

    # --- record
    stated = getattr(data, "sha256", None)
    outcome.data_sha256 = None if stated is None else str(stated)
    finish(job, rank, outcome)
    if dist.is_initialized():
        dist.destroy_process_group()


def _fit(job: Job, rank: Rank, parts: Parts, outcome: Outcome) -> LitTrainer:
    """Trains, and records what is known after the last step."""
    given, bar = _as_list(parts.options.get("callbacks")), _bar(parts)
    logger = RunLogger()
    monitor = StepMonitorCallback(job, rank, outcome.clock, parts.network, logger, bar)
    save = RunCheckpoint(job, monitor, bar)
    trainer = _trainer(job, parts, [monitor, *given, *([bar] if bar else []), save], logger)
    # From here on, a signal stops all ranks after the same step, once the checkpoint is saved.
    with STOP.deferred():
        trainer.fit(parts.module, datamodule=parts.data, ckpt_path=job.checkpoint, weights_only=True)
    total = monitor.total_steps(trainer) or math.inf
    early = _reason_to_stop(trainer) if trainer.global_step < total else None
    outcome.trained = monitor.close(trainer, stopped_early=early)
    outcome.validation = job.note_partial(evaluation_results(parts.module, logger.validation), "val")
    outcome.add_inexact(trainer.inexact_evaluation)
    return trainer


def _bar(parts: Parts) -> RunProgressBar | None:
    """Returns the progress bar, unless it is disabled or the user has another one."""
    given = _as_list(parts.options.get("callbacks"))
    shows = parts.options.get("enable_progress_bar", True) and not any(isinstance(each, ProgressBar) for each in given)
    return RunProgressBar() if shows else None


def _trainer(job: Job, parts: Parts, callbacks: list[Any], logger: RunLogger | None = None) -> LitTrainer:
    """Returns the Trainer, which has checkpoints and loggers if the job trains."""
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, **parts.options}
    given, loggers = _as_list(options.pop("callbacks", None)), _as_list(options.pop("logger", None))
    callbacks = callbacks if logger else [*given, *callbacks]
    for callback in given:
        # Beside last.ckpt, `save_last` would replace it.
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(job.folder / "model_checkpoints")
    options["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    trainer = LitTrainer(
        **options,
        precision=job.precision,
        accelerator="gpu" if job.devices.kind == "cuda" else "cpu",
        devices=list(job.devices.numbers) if job.devices.kind == "cuda" else job.devices.count,
        num_nodes=job.world_size // job.devices.count,
        timeout=job.run.timeout,
        default_root_dir=job.folder,
        callbacks=callbacks,
        logger=[logger, *loggers] if logger else False,
        # A configuration of a training may name a ModelCheckpoint, which an evaluation does not use.
        enable_checkpointing=logger is not None or any(isinstance(callback, ModelCheckpoint) for callback in given),
    )
    disable_signal_handling(trainer)
    return trainer


def _as_list(value: Any) -> list[Any]:
    """Converts an option to a list of objects; it may be an object, a list, a boolean or None."""
    return list(value) if isinstance(value, list) else [] if value is None or isinstance(value, bool) else [value]


def _writes_outputs(job: Job) -> bool:
    """Returns whether the outputs of a prediction are written as they are."""
    return job.command == "predict" and job.predictions is None


def _load(module: LightningModule, checkpoint: dict[str, Any], place: str) -> None:
    """Loads the weights of a checkpoint.

    Raises:
        InputError: They do not fit the module.
    """
    module.on_load_checkpoint(checkpoint)
    try:
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    except RuntimeError as error:
        raise InputError(f"{place} does not fit the module: {' '.join(str(error).split())[:300]}") from error


def _load_best(job: Job, rank: Rank, trainer: LitTrainer, module: LightningModule) -> None:
    """Loads the best weights of the run; every rank must call it. Only rank 0 can rely on the file being there."""
    folder = job.folder / "checkpoints"
    place = folder / (BEST if (folder / BEST).exists() else LAST)
    others = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    if chosen := next((each.best_model_path for each in others if each.best_model_path), ""):
        place = Path(chosen)
        if rank.is_first:
            print_line(f"note: testing the best checkpoint of ModelCheckpoint, {display_path(place)}")
    # The first rank has waited for its last write.
    place = Path(all_gather_json(place)[0])
    everywhere = all(all_gather_json(place.is_file()))
    if rank.is_first or everywhere:
        _load(module, read_checkpoint(place, hashed=False), str(place))
    if not everywhere:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def _has(evaluation: str, module: LightningModule, data: LightningDataModule | None) -> bool:
    """Returns whether a module can be tested or predict; Lightning's `predict_step` calls `forward`."""
    return (evaluation == "predict" or is_overridden("test_step", module)) and any(
        is_overridden(f"{evaluation}_dataloader", each) for each in (module, data) if each
    )


def _merged(metrics: Any) -> dict[str, float]:
    return {name: value for each in metrics for name, value in each.items()}


def _reason_to_stop(trainer: LitTrainer) -> str:
    """Returns why a callback stopped the training."""
    for callback in trainer.early_stopping_callbacks:
        if message := callback.stopping_reason_message:
            return str(message).removeprefix("Monitored metric ").removesuffix(" Signaling Trainer to stop.")
    for timer in trainer.callbacks:  # type: ignore[attr-defined] # Lightning sets it elsewhere
        if isinstance(timer, Timer) and timer.time_remaining() is not None and (timer.time_remaining() or 0) <= 0:
            return f"trainer.max_time is over after {timer.time_elapsed():.0f} s."
    return "a callback asked for it."


if __name__ == "__main__":
    from lit_mnist.cli.entry import entry

    entry("lightning")
