"""Observes Lightning: logged values, the state of a module, and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from ddp_doctor.probes.rows import rows_of_file
from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import digest
from ddp_doctor.torch_internals import tree_leaves


class LightningProbe(pl.Callback):
    """Records what the module logs and how its evaluation ends.

    Args:
        probes: The probes of this process.
    """

    def __init__(self, probes: Any) -> None:
        self.probes, self.recorder = probes, probes.recorder
        wrap(pl.LightningModule, "log", self._on_log)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the parts of the module their names."""
        self.probes.modules.name(pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seeds the generators by the epoch, so that a resumed training has the same order and draws."""
        self.probes.loaders.seed(pl_module, getattr(trainer, "datamodule", None))
        if self.probes.spec.purpose in {"whole", "resume"}:
            self.recorder.add("begin", values=state_of(pl_module, trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops after the first epoch, with the schedule of two."""
        if self.probes.spec.purpose == "save":
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records the metrics of a validation."""
        if trainer.state.fn == "fit":
            self.recorder.add("metrics", stage="fit", values=logged_values(trainer))

    def record_predictions(self, outputs: Any) -> None:
        """Records the size and a digest of each batch of predictions."""
        batches = [[leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)] for batch in outputs or ()]
        rows = [leaf for leaves in batches for leaf in leaves[:1]]
        self.recorder.add("predictions", sizes=[len(row) if row.ndim else 1 for row in rows])
        for number, row in enumerate(rows):
            self.recorder.keep(f"prediction/{number}", row)
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
            type=type(value).__name__,
            sync_dist=bool(kwargs.get("sync_dist")),
            batch_size=kwargs.get("batch_size"),
            reduce_fx=str(kwargs.get("reduce_fx", "mean")),
            stage=str(module.trainer.state.stage) if module._trainer is not None else "",
        )
        return original(module, name, value, *args, **kwargs)


def logged_values(trainer: pl.Trainer) -> dict[str, float]:
    """Returns the metrics that callbacks and loggers get."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}


def state_of(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, str]:
    """Returns digests of all tensors and counts that a training keeps, by their place."""
    found: dict[str, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found[f"weights {name}"] = digest(tensor)
    for number, optimizer in enumerate(trainer.optimizers):
        _walk(f"optimizer {number}", optimizer.state_dict()["state"], found)
    for number, config in enumerate(trainer.lr_scheduler_configs):
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
        found[place] = digest(
            value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        )
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
