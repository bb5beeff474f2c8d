"""Probe of Lightning's Trainer in a script: it ends its epochs early by itself, so that it validates after them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from ddp_doctor.files.after_import import AfterImport
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class TrainerProbe:
    """Shortens the epochs of a Trainer as its user would, and records which metrics its callbacks monitor."""

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec

    def install(self) -> None:
        """Installs the probe as soon as a package is imported."""
        changes: dict[str, Callable[[Any], None]] = {}
        for package in _PACKAGES:
            changes[f"{package}.trainer.trainer"] = lambda module: wrap(module.Trainer, "__init__", self._on_trainer)
            for name, kind in (("model_checkpoint", "ModelCheckpoint"), ("early_stopping", "EarlyStopping")):
                changes[f"{package}.callbacks.{name}"] = lambda module, kind=kind: self._watch(  # type: ignore[misc]
                    getattr(module, kind)
                )
        sys.meta_path.insert(0, AfterImport(changes))

    def _watch(self, kind: Any) -> None:
        before(kind, "__init__", self._on_callback)
        before(kind, "on_validation_end", self._on_validation_end)

    def _on_validation_end(self, callback: Any, trainer: Any, *_: Any) -> None:
        """Records the metric by which a callback decides, which the program may print nowhere."""
        name = getattr(callback, "monitor", None)
        value = trainer.callback_metrics.get(name) if name and not self.recorder.rank else None
        if value is not None and not trainer.sanity_checking:
            key = f"{type(callback).__name__} {name}"
            values = [(float(value), abs(float(value)) * 1e-6, "")]
            self.recorder.add("reported", key=key, values=values, name=name, by_trainer=True)

    def _on_trainer(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
        names = list(inspect.signature(original).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.get("fast_dev_run"):
            limit, steps = given.get("limit_train_batches"), self.spec.steps
            most = steps * int(given.get("accumulate_grad_batches") or 1)
            # A share of the batches is not known yet; a smaller number of them is the user's.
            given["limit_train_batches"] = min(limit, most) if type(limit) is int else most
            if isinstance(given.get("val_check_interval"), int):
                given["val_check_interval"] = min(given["val_check_interval"], given["limit_train_batches"])
        original(trainer, **given)

    def _on_callback(self, callback: Any, *args: Any, **kwargs: Any) -> None:
        names = list(inspect.signature(type(callback).__init__).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("monitor"):
            self.recorder.add("monitor", name=str(given["monitor"]), callback=type(callback).__name__)
