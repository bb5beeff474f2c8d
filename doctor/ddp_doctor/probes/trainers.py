"""Probe of Lightning's Trainer in a script: it ends its epochs early by itself, so that it validates after them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ddp_doctor.after_import import after_import
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


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
        after_import(changes)

    def _change(self, module: Any) -> None:
        wrap(module.Trainer, "__init__", self._on_trainer)
        short = module.Trainer.estimated_stepping_batches
        # A schedule has the length of the whole training run; Lightning itself does not ask for it.
        whole = property(lambda trainer: self._steps(trainer, short.fget(trainer)), doc=short.__doc__)
        module.Trainer.estimated_stepping_batches = whole

    def _batches(self, trainer: Any) -> float:
        """Returns the batches of a whole epoch; 0 if they are not known."""
        loader, limit = trainer.train_dataloader, self._limits.get(trainer)
        if isinstance(loader, list | tuple | dict) or trainer.fast_dev_run or trainer.overfit_batches:
            return 0
        try:
            count = len(loader)
        except (TypeError, NotImplementedError):
            return 0
        if limit is None:
            return count
        return min(limit, count) if isinstance(limit, int) else int(count * limit)

    def _steps(self, trainer: Any, short: float) -> float:
        """Returns the optimizer steps of the whole training run if they are known, else those of the shortened one."""
        batches = self._batches(trainer)
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
        given = _given(original, args, kwargs)
        if not given.get("fast_dev_run"):
            limit, steps = given.get("limit_train_batches"), self.spec.most_steps
            most = steps * int(given.get("accumulate_grad_batches") or 1)
            # A share of the batches is not known yet; a smaller number of them is the user's.
            given["limit_train_batches"] = min(limit, most) if type(limit) is int else most
            if limit != most:
                self._limits[trainer] = limit
            if isinstance(given.get("val_check_interval"), int):
                given["val_check_interval"] = min(given["val_check_interval"], given["limit_train_batches"])
        original(trainer, **given)

    def _on_callback(self, callback: Any, *args: Any, **kwargs: Any) -> None:
        if name := _given(type(callback).__init__, args, kwargs).get("monitor"):
            self.recorder.add("monitor", name=str(name))


def _given(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a method by name, without the object."""
    return {**dict(zip(list(inspect.signature(function).parameters)[1:], args, strict=False)), **kwargs}
