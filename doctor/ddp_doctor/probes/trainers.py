"""Probe of Lightning's Trainer in a script: it ends its epochs early by itself, so that it validates after them."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ddp_doctor.after_import import AfterImport
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_OF_LIGHTNING = {"lightning", "pytorch_lightning"}


class TrainerProbe:
    """Shortens the epochs of a Trainer as its user would, and records which metrics its callbacks monitor."""

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        # What the user has given as `limit_train_batches`.
        self._limits: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def install(self) -> None:
        """Installs the probe as soon as a package is imported."""
        changes: dict[str, Callable[[Any], None]] = {}
        for package in _PACKAGES:
            changes[f"{package}.trainer.trainer"] = self._change
            for name, kind in (("model_checkpoint", "ModelCheckpoint"), ("early_stopping", "EarlyStopping")):
                changes[f"{package}.callbacks.{name}"] = lambda module, kind=kind: self._watch(  # type: ignore[misc]
                    getattr(module, kind)
                )
        sys.meta_path.insert(0, AfterImport(changes))

    def _change(self, module: Any) -> None:
        wrap(module.Trainer, "__init__", self._on_trainer)
        for name, whole in (("estimated_stepping_batches", self._steps), ("num_training_batches", self._batches)):
            short = getattr(module.Trainer, name)
            setattr(module.Trainer, name, property(partial(_as_seen, name, short.fget, whole), doc=short.__doc__))

    def _batches(self, trainer: Any, short: float) -> float:
        """Returns the batches of a whole epoch if they are known, else those of the shortened one."""
        loader, limit = trainer.train_dataloader, self._limits.get(trainer)
        if isinstance(loader, list | tuple | dict) or trainer.fast_dev_run or trainer.overfit_batches:
            return short
        try:
            count = len(loader)
        except (TypeError, NotImplementedError):
            return short
        if limit is None:
            return count
        return min(limit, count) if isinstance(limit, int) else int(count * limit)

    def _steps(self, trainer: Any, short: float) -> float:
        """Returns the optimizer steps of the whole training run if they are known, else those of the shortened one."""
        batches = self._batches(trainer, 0)
        if not batches or not math.isfinite(short) or trainer.max_epochs is None or trainer.max_epochs < 0:
            return short
        steps = math.ceil(batches / trainer.accumulate_grad_batches) * max(trainer.max_epochs, 1)
        return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

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
            if limit != most:
                self._limits[trainer] = limit
            if isinstance(given.get("val_check_interval"), int):
                given["val_check_interval"] = min(given["val_check_interval"], given["limit_train_batches"])
        original(trainer, **given)

    def _on_callback(self, callback: Any, *args: Any, **kwargs: Any) -> None:
        names = list(inspect.signature(type(callback).__init__).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("monitor"):
            self.recorder.add("monitor", name=str(given["monitor"]))


def _as_seen(name: str, short: Callable[[Any], Any], whole: Callable[[Any, Any], Any], trainer: Any) -> Any:
    """Returns a length: for what runs the epochs that of the shortened run, for a schedule that of the whole run."""
    value = short(trainer)
    frame = sys._getframe(1)
    if frame.f_globals.get("__name__", "").partition(".")[0] in _OF_LIGHTNING:
        return value
    while name == "num_training_batches" and frame.f_code.co_name != "configure_optimizers":
        if frame.f_back is None or frame.f_globals.get("__name__", "").partition(".")[0] in _OF_LIGHTNING:
            return value
        frame = frame.f_back
    return whole(trainer, value)
