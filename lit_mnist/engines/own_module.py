"""The user's own LightningModule under Lightning's Trainer, with the run folder, the ranks and the exit codes of a run.

lit-mnist fit --config mine.yaml --import my_package --devices 2
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.checkpoint.saved import make_section
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import rendezvous_store
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.engines.own_callbacks import MetricsLogger, OwnMonitor, RunCheckpoint, WritePredictions
from lit_mnist.engines.own_job import Outcome, OwnJob, build_result, summarize
from lit_mnist.errors import InputError
from lit_mnist.plugins.strategy import SafeDDPStrategy
from lit_mnist.report.metrics import write_metrics_report
from lit_mnist.run.folder import REPORT, RunFolder
from lit_mnist.run.metrics_log import MetricsLog, read_metrics
from lit_mnist.run.result import total_gpu_memory, total_memory
from lit_mnist.run.timing import StepClock
from lit_mnist.trainer import LitTrainer, silence_lightning

# The optimizer steps between two saves, if `run.save_every` is unset.
_SAVE_EVERY = 100


def run(job: OwnJob, rank: Rank) -> None:
    """Runs a job in one rank.

    Raises:
        InputError: Lightning rejects the module, its data or an option.
    """
    try:
        _run(job, rank)
    except MisconfigurationException as error:
        raise InputError(f"Lightning rejects the run: {' '.join(str(error).split())}") from error


def _run(job: OwnJob, rank: Rank) -> None:
    # --- setup
    device = job.devices.of(rank)
    silence_lightning()
    if rank.world_size > 1 and (store := rendezvous_store(rank, job.run.timeout)):
        # Under torchrun, Lightning would confuse the process groups of restarts. It uses an existing group.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=job.run.timeout),
        )

    # --- model and data: the same on all ranks
    seed_everything(job.seed, workers=True, verbose=False)
    module, data, options = job.make()
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    data_name = f"{type(data).__module__}.{type(data).__qualname__}" if data else None

    # --- train
    clock = StepClock(1, job.first_process)
    outcome = _fit(job, rank, clock, module, data, options) if job.trains else Outcome(_trainer(job, options), clock)
    trainer = outcome.trainer
    if not job.trains:
        outcome.weights = _load_weights(job, module)

    # --- evaluate
    loaded: dict[str, Any] = {"verbose": False, "weights_only": True}
    if job.command == "test" or (job.command == "train" and _has_test(module, data)):
        best = trainer.checkpoint_callback.best_model_path if job.trains else ""  # type: ignore[union-attr]
        if best and rank.is_first:
            print_line(f"note: testing the best checkpoint of ModelCheckpoint, {display_path(Path(best))}")
        outcome.test = _merged(trainer.test(module, datamodule=data, ckpt_path=best or None, **loaded))
        outcome.add_inexact(trainer)
    elif job.command == "validate":
        outcome.validation = _merged(trainer.validate(module, datamodule=data, **loaded))
        outcome.add_inexact(trainer)
    elif job.command == "predict":
        trainer.predict(module, datamodule=data, weights_only=True, return_predictions=False)

    # --- record
    memory = total_memory(clock, rank, device, job.first_process)
    gpu_memory = total_gpu_memory(rank, device, [device])
    if rank.is_first and job.command != "predict":
        result = {**build_result(job, rank, device, outcome, name, data_name)}
        result |= {"peak_memory_bytes": memory, "peak_gpu_memory_bytes": gpu_memory}
        RunFolder(job.folder).write_result(result)
        write_metrics_report(job.folder / REPORT, result=result, history=read_metrics(job.folder))
        summarize(job, rank, outcome)
    if dist.is_initialized():
        dist.destroy_process_group()


def _fit(
    job: OwnJob,
    rank: Rank,
    clock: StepClock,
    module: LightningModule,
    data: LightningDataModule | None,
    options: dict[str, Any],
) -> Outcome:
    """Trains, and returns what is known after the last step."""
    log = MetricsLog(job.folder, _logged_steps(job.checkpoint), (), ("step", "epoch")) if rank.is_first else None
    logger = MetricsLogger(log)
    monitor = OwnMonitor(job.run, job.folder, rank, clock, job.trainer.get("log_every_n_steps", 50))
    every = job.run.save_steps or (None if job.run.save_seconds else _SAVE_EVERY)
    save = RunCheckpoint(job.folder / "checkpoints", every, job.run.save_seconds, job.run.keep, _section(job))
    trainer = _trainer(job, options, [monitor], [save], logger)
    logger.trainer = trainer
    # From here on, a signal stops all ranks after the same batch, once the checkpoint is saved.
    with STOP.deferred():
        trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
    monitor.close()
    reasons = [callback.stopping_reason_message for callback in trainer.early_stopping_callbacks]
    outcome = Outcome(
        trainer,
        clock,
        weights=_copied(module),
        seconds=clock.seconds,
        steps=trainer.global_step,
        steps_now=monitor.steps_now,
        epochs=trainer.current_epoch,
        stopped_early=next(filter(None, reasons), None),
        validation=logger.validation or None,
    )
    outcome.add_inexact(trainer)
    return outcome


def _trainer(
    job: OwnJob,
    options: dict[str, Any],
    first: list[Any] | None = None,
    last: list[Any] | None = None,
    logger: MetricsLogger | None = None,
) -> LitTrainer:
    """Returns the Trainer with the user's callbacks between the project's."""
    made = dict(options)
    callbacks, loggers = _as_list(made.pop("callbacks", None)), _as_list(made.pop("logger", None))
    for callback in callbacks:
        # Beside last.ckpt, `save_last` would replace it.
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(job.folder / "model_checkpoints")
    strategy: Any = "auto"
    if job.world_size > 1:
        strategy = SafeDDPStrategy(
            process_group_backend="nccl" if job.devices.kind == "cuda" else "gloo",
            timeout=timedelta(seconds=job.run.timeout),
            find_unused_parameters=job.strategy == "ddp_find_unused_parameters_true",
        )
    arguments = {"num_sanity_val_steps": 0, "enable_model_summary": False, **made, **job.trainer}
    # A bar in a file is of no use; there is a line for each epoch.
    arguments["enable_progress_bar"] = arguments.get("enable_progress_bar", True) and sys.stdout.isatty()
    if job.command == "predict":
        callbacks.append(WritePredictions(job.folder))
    return LitTrainer(
        **arguments,
        precision=job.precision,
        accelerator="gpu" if job.devices.kind == "cuda" else "cpu",
        devices=list(job.devices.numbers) if job.devices.kind == "cuda" else job.devices.count,
        num_nodes=job.world_size // job.devices.count,
        strategy=strategy,
        timeout=job.run.timeout,
        default_root_dir=job.folder,
        callbacks=[*(first or []), *callbacks, *(last or [])],
        logger=[logger, *loggers] if logger else False,
        # A configuration of a training may name a ModelCheckpoint, which an evaluation does not use.
        enable_checkpointing=bool(last) or any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )


def _section(job: OwnJob) -> dict[str, Any]:
    return make_section(
        engine="lightning",
        config=job.config,
        precision=job.precision,
        threads=job.threads,
        local_world_size=job.devices.count,
        world_size=job.world_size,
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None or isinstance(value, bool) else [value]


def _load_weights(job: OwnJob, module: LightningModule) -> dict[str, torch.Tensor]:
    from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO

    assert job.checkpoint is not None
    checkpoint = VerifiedCheckpointIO(background=False).load_checkpoint(job.checkpoint)
    module.on_load_checkpoint(checkpoint)
    try:
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    except RuntimeError as error:
        raise InputError(f"{job.checkpoint} does not fit the module: {' '.join(str(error).split())[:300]}") from error
    return _copied(module)


def _copied(module: LightningModule) -> dict[str, torch.Tensor]:
    """Returns the tensors of the state of a module, copied to the CPU."""
    state = module.state_dict().items()
    return {name: value.detach().cpu().clone() for name, value in state if isinstance(value, torch.Tensor)}


def _has_test(module: LightningModule, data: LightningDataModule | None) -> bool:
    return is_overridden("test_step", module) and any(
        is_overridden("test_dataloader", each) for each in (module, data) if each
    )


def _logged_steps(checkpoint: Path | None) -> int:
    """Returns the batches that have made an optimizer step before a resume, which count the steps of the loggers."""
    if checkpoint is None:
        return 0
    loops = read_checkpoint(checkpoint)["loops"]
    return int(loops["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"])


def _merged(metrics: Any) -> dict[str, float]:
    return {name: value for each in metrics for name, value in each.items()}
