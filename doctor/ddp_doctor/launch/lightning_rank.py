"""Runs a LightningModule as its user would, under a stock Trainer, and observes what it logs, keeps and predicts."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_doctor.errors import InputError
from ddp_doctor.launch.rank import described
from ddp_doctor.probes.wrap import wrap
from ddp_doctor.probes.written_files import rows_of_file
from ddp_doctor.records.recorder import digest
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import tree_leaves

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
    pl = package_of(module)
    if not issubclass(module, pl.LightningModule):
        raise InputError(f"{module.__name__} is not a LightningModule.")
    if data is not None and isinstance(data, type) and not issubclass(data, pl.LightningDataModule):
        raise InputError(f"{data.__name__} is not a LightningDataModule.")
    _run(pl, module(), data() if data else None, spec, probes, {})


def package_of(module: type) -> Any:
    """Returns the package whose LightningModule a class extends: `pytorch_lightning` or `lightning.pytorch`."""
    roots = {base.__module__.partition(".")[0] for base in module.__mro__}
    return importlib.import_module("pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch")


def run_config(spec: Spec, probes: Any) -> None:
    """Runs the classes that a configuration of LightningCLI names."""
    import yaml

    content = yaml.safe_load(Path(spec.target.config).read_text()) or {}
    sections, pl = set(content), _package_of_config(content)
    command: Any = importlib.import_module(f"{pl.__name__}.cli").LightningCLI

    class Parser(command):  # type: ignore[misc]
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
    _run(pl, cli.model, cli.datamodule, spec, probes, options)


def _package_of_config(content: dict[str, Any]) -> Any:
    """Returns the package of the model that a configuration names by `class_path`."""
    name, _, attribute = str((content.get("model") or {}).get("class_path", "")).rpartition(".")
    found = None
    with suppress(ImportError, ValueError):
        found = getattr(importlib.import_module(name), attribute, None)
    return package_of(found if isinstance(found, type) else object)


def _run(pl: Any, module: Any, data: Any, spec: Spec, probes: Any, options: dict[str, Any]) -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")
    probe = type("LightningProbe", (_Probe, pl.Callback), {})(pl, probes)
    is_overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
    accumulation = int(options.get("accumulate_grad_batches", 1))
    # What a user's own run saves at the end of each epoch.
    saves = spec.saves and spec.purpose == "train"
    save = [pl.callbacks.ModelCheckpoint(spec.checkpoints, "{epoch}", save_top_k=-1, every_n_epochs=1)] if saves else []
    unused = not module.automatic_optimization or bool(spec.interventions.get("find_unused"))
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=spec.world_size,
        strategy=strategy if spec.world_size > 1 else "auto",
        max_epochs=2 if spec.later else spec.epochs,
        limit_train_batches=spec.most_steps * accumulation,
        limit_val_batches=1.0 if spec.later or spec.purpose != "numbers" else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=probes.recorder.folder,
        callbacks=[probe, *save],
        precision="64-true" if spec.double else None,
        **options,
    )
    probes.recorder.active = True
    owners = [owner for owner in (module, data) if owner is not None]
    validates, predicts = (
        any(is_overridden(f"{name}_dataloader", owner) for owner in owners) for name in ("val", "predict")
    )
    probes.facts |= {"module": True, "predicts": predicts}

    def fit(first_epoch: int) -> None:
        if spec.saves:
            probes.loaders.seed_epochs(first_epoch)
        trainer.fit(module, datamodule=data, ckpt_path=f"{spec.checkpoints}/epoch=0.ckpt" if first_epoch else None)
        if spec.saves:
            probes.recorder.add("state", values=state_of(module, trainer))

    def validate() -> None:
        if draws := spec.interventions.get("draws"):
            torch.manual_seed(spec.seed + int(draws))
        if validates and is_overridden("validation_step", module):
            trainer.validate(module, datamodule=data, verbose=False)
            probes.recorder.add("metrics", values=logged_values(trainer))

    def predict() -> None:
        if predicts:
            probe.record_predictions(trainer.predict(module, datamodule=data))

    if spec.purpose != "evaluate":
        fit(0)
        torch.set_grad_enabled(True)
        return
    # What fails in one part is recorded, and the next one is made.
    failed: Exception | None = None
    works: dict[str, Callable[[], None]] = {"": validate, "predict": predict, "resume": partial(fit, 1)}
    for part, work in works.items():
        if part in spec.parts:
            probes.begin(part, described(failed) if failed else None)
        elif part:
            continue
        failed = None
        try:
            work()
        except Exception as error:
            failed = error
        torch.set_grad_enabled(True)
    if failed:
        raise failed


class _Probe:
    """Mixed into a Callback of the package in use, records what the module logs and how its evaluation ends."""

    def __init__(self, pl: Any, probes: Any) -> None:
        self.probes, self.recorder = probes, probes.recorder
        wrap(pl.LightningModule, "log", self._on_log)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the parts of the module their names."""
        self.probes.modules.name(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Seeds the generators by the epoch, so that a resumed run has the same order and draws."""
        self.probes.loaders.seed(pl_module, getattr(trainer, "datamodule", None))
        if self.probes.spec.saves:
            self.recorder.add("begin", values=state_of(pl_module, trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Records the metrics of a validation."""
        if trainer.state.fn == "fit":
            self.recorder.add("metrics", values=logged_values(trainer))

    def record_predictions(self, outputs: Any) -> None:
        """Records the size and a digest of each batch of predictions."""
        for number, batch in enumerate(outputs or ()):
            for leaf in [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)][:1]:
                self.recorder.keep(f"prediction/{number}", leaf)
        for event in self.recorder.events:
            if event["kind"] == "open":
                event["rows"] = rows_of_file(Path(event["path"]))

    def _on_log(self, original: Any, module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        number = value if isinstance(value, int | float) else None
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            number = float(value)
        self.recorder.add(
            "log",
            name=name,
            value=number,
            batch_size=kwargs.get("batch_size"),
            reduce_fx=str(kwargs.get("reduce_fx", "mean")),
        )
        return original(module, name, value, *args, **kwargs)


def logged_values(trainer: Any) -> dict[str, float]:
    """Returns the metrics that callbacks and loggers get."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}


def state_of(module: Any, trainer: Any) -> dict[str, str]:
    """Returns digests of all tensors and counts that a run keeps, by their place."""
    found: dict[str, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found[f"weights {name}"] = digest(tensor)
    for number, optimizer in enumerate(trainer.optimizers):
        _walk(f"optimizer {number}", optimizer.state_dict()["state"], found)
    for number, config in enumerate(trainer.lr_scheduler_configs):
        # Lightning does not repeat the step of one that follows a metric when it resumes.
        if not config.reduce_on_plateau:
            _walk(f"scheduler {number}", config.scheduler.state_dict(), found)
    own = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and key
        not in {"trainer", "training", "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"}
    }
    _walk("attribute", own, found)
    return found


def _walk(place: str, value: Any, found: dict[str, str], depth: int = 0) -> None:
    if isinstance(value, torch.Tensor | np.ndarray):
        found[place] = digest(torch.as_tensor(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value))
    elif isinstance(value, torch.nn.Module) and depth:
        for name, tensor in value.state_dict().items():
            found[f"{place}.{name}"] = digest(tensor)
    elif isinstance(value, dict) and depth < 5:
        for key, part in value.items():
            _walk(f"{place} {key}", part, found, depth + 1)
    elif isinstance(value, list | tuple) and depth < 5:
        for number, part in enumerate(value):
            _walk(f"{place} {number}", part, found, depth + 1)
    elif isinstance(value, bool | int | float):
        found[place] = repr(value)
