"""Runs a LightningModule as its user would: under a stock Trainer, on this rank."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from ddp_doctor.errors import InputError
from ddp_doctor.probes.lightning import LightningProbe, logged_values, state_of
from ddp_doctor.records.spec import Spec

# Options of the section `trainer` of a configuration that change what is computed.
_KEPT = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "sync_batchnorm",
    "use_distributed_sampler",
    "deterministic",
    "reload_dataloaders_every_n_epochs",
)
_SECTIONS = {"seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler"}


def run_module(module: Any, data: Any, spec: Spec, probes: Any) -> None:
    """Runs the part of the examination that the specification names."""
    if not issubclass(module, pl.LightningModule):
        raise InputError(f"{module.__name__} is not a LightningModule.")
    if data is not None and isinstance(data, type) and not issubclass(data, pl.LightningDataModule):
        raise InputError(f"{data.__name__} is not a LightningDataModule.")
    _run(module(), data() if data else None, spec, probes, {})


def run_config(spec: Spec, probes: Any) -> None:
    """Runs the classes that a configuration of LightningCLI names."""
    import yaml
    from lightning.pytorch.cli import LightningCLI

    sections = set(yaml.safe_load(Path(spec.target.config).read_text()) or {})

    class Parser(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            # A project's own command may have further sections.
            for name in sections - _SECTIONS:
                parser.add_argument(f"--{name}", type=Any, default=None)

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return None

    cli = Parser(
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=["--config", spec.target.config],
    )
    given = cli.config.get("trainer") or {}
    options = {name: given[name] for name in _KEPT if given.get(name) is not None}
    _run(cli.model, cli.datamodule, spec, probes, options)


def _run(module: Any, data: Any, spec: Spec, probes: Any, options: dict[str, Any]) -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    probe = LightningProbe(probes)
    accumulation = int(options.get("accumulate_grad_batches", 1))
    epochs = 2 if spec.purpose in {"save", "resume", "whole"} else spec.epochs
    unused = not module.automatic_optimization or bool(spec.interventions.get("find_unused"))
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=spec.world_size,
        strategy=strategy if spec.world_size > 1 else "auto",
        max_epochs=epochs,
        limit_train_batches=spec.steps * accumulation,
        limit_val_batches=1.0 if spec.purpose in {"train", "evaluate"} else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=probes.recorder.folder,
        callbacks=[probe],
        precision="64-true" if spec.double else None,
        **options,
    )
    probes.recorder.active = True
    owner = data if data is not None and is_overridden("predict_dataloader", data) else module
    probes.facts |= {"module": True, "predicts": is_overridden("predict_dataloader", owner)}
    recorder = probes.recorder
    if spec.purpose == "evaluate":
        if draws := spec.interventions.get("draws"):
            torch.manual_seed(spec.seed + int(draws))
        trainer.validate(module, datamodule=data, verbose=False)
        recorder.add("metrics", stage="validate", values=logged_values(trainer))
    elif spec.purpose == "predict":
        outputs = trainer.predict(module, datamodule=data)
        probe.record_predictions(outputs)
    else:
        path = os.environ.get("DDP_DOCTOR_CHECKPOINT", "")
        trainer.fit(module, datamodule=data, ckpt_path=path if spec.purpose == "resume" else None)
        if spec.purpose == "save":
            trainer.save_checkpoint(Path(path))
        if spec.purpose in {"save", "resume", "whole"}:
            recorder.add("state", values=state_of(module, trainer))
    torch.set_grad_enabled(True)
