"""Trains a LightningModule as its user's script would: with a stock Trainer, from its last checkpoint if it has one."""

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.launch.rank import load_object
from ddp_doctor.records.spec import Spec

# Its checkpoint, in the current folder.
_CHECKPOINT = Path("ddp-doctor-checkpoints", "last.ckpt")
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


def run_module(module: Any, data: Any, spec: Spec) -> None:
    """Trains a LightningModule with its data; both are classes."""
    _train(package_of(module), module(), data() if data else None, spec.world_size, {})


def package_of(module: Any) -> Any:
    """Returns the package whose LightningModule a class extends: `pytorch_lightning` or `lightning.pytorch`."""
    roots = {base.__module__.partition(".")[0] for base in getattr(module, "__mro__", ())}
    return importlib.import_module("pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch")


def run_config(spec: Spec) -> None:
    """Trains the classes that a configuration of LightningCLI names."""
    import yaml

    content = yaml.safe_load(Path(spec.target.config).read_text()) or {}
    place, _, name = str((content.get("model") or {}).get("class_path", "")).rpartition(".")
    pl = package_of(load_object(f"{place}:{name}") if place else object)
    command: Any = importlib.import_module(f"{pl.__name__}.cli").LightningCLI

    class Parser(command):  # type: ignore[misc]
        def add_arguments_to_parser(self, parser: Any) -> None:
            # A project's own command may have further sections.
            for name in content.keys() - _SECTIONS:
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
    _train(pl, cli.model, cli.datamodule, spec.world_size, options)


def _train(pl: Any, module: Any, data: Any, world_size: int, options: dict[str, Any]) -> None:
    unused = not module.automatic_optimization
    ddp = pl.strategies.DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
    # After each epoch, over the one before.
    save = pl.callbacks.ModelCheckpoint(
        _CHECKPOINT.parent, _CHECKPOINT.stem, save_top_k=-1, every_n_epochs=1, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ddp if world_size > 1 else "auto",
        max_epochs=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[save],
        **options,
    )
    trainer.fit(module, datamodule=data, ckpt_path=_CHECKPOINT if _CHECKPOINT.exists() else None)
    is_overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
    if any(is_overridden("predict_dataloader", owner) for owner in (module, data) if owner is not None):
        # LD030 says why a prediction fails, which does not undo what was trained.
        with suppress(Exception):
            trainer.predict(module, datamodule=data)
