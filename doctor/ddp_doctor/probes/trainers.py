"""Probe of Lightning's Trainer: it ends its epochs early by itself, and what it logs and predicts is recorded."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ddp_doctor.after_import import after_import
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.probes.written_files import rows_of_file
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec, logged_name
from ddp_doctor.torch_internals import tree_leaves


class TrainerProbe:
    """Shortens the epochs of a Trainer as its user would, and records its metrics, and which ones decide.

    Args:
        recorder: Takes the events.
        spec: The run.
        name: Gives the parts of a module their names.
    """

    def __init__(self, recorder: Recorder, spec: Spec, name: Callable[[torch.nn.Module], None]) -> None:
        self.recorder, self.spec, self._name = recorder, spec, name
        # What the user has given as `limit_train_batches`.
        self._limits: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        # The first callback of each Trainer that is told the end of a validation, and where values are logged in it.
        self._told: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._logged: dict[str, str] = {}

    def install(self) -> None:
        """Installs the probe as soon as a package is imported."""
        changes: dict[str, Callable[[Any], None]] = {}
        for package in ("lightning.pytorch", "pytorch_lightning"):
            changes[f"{package}.trainer.trainer"] = self._change
            changes[f"{package}.core.module"] = lambda module: before(module.LightningModule, "log", self._on_log)
            changes[f"{package}.callbacks.model_checkpoint"] = lambda module: self._watch(module.ModelCheckpoint)
            changes[f"{package}.callbacks.early_stopping"] = lambda module: self._watch(module.EarlyStopping)
        after_import(changes)

    def _change(self, module: Any) -> None:
        wrap(module.Trainer, "__init__", self._on_trainer)
        before(module.Trainer, "fit", lambda trainer, model, *_, **__: self._name(model))
        wrap(module.Trainer, "predict", self._on_predict)
        short = module.Trainer.estimated_stepping_batches
        whole = property(lambda trainer: self._steps(trainer, short.fget), doc=short.__doc__)
        module.Trainer.estimated_stepping_batches = whole

    def _steps(self, trainer: Any, estimate: Callable[[Any], float]) -> float:
        """Returns the optimizer steps of the whole training, which a schedule has; Lightning itself does not ask."""
        steps, loop, loader = estimate(trainer), trainer.fit_loop, trainer.train_dataloader
        if trainer not in self._limits or trainer.overfit_batches or isinstance(loader, list | tuple | dict):
            return steps
        limit, shortened = self._limits[trainer], loop.max_batches
        with suppress(TypeError, NotImplementedError):
            count = len(loader)
            loop.max_batches = min(limit, count) if isinstance(limit, int) else int(count * limit)
            steps = estimate(trainer)
        loop.max_batches = shortened
        return steps

    def _watch(self, kind: Any) -> None:
        before(kind, "__init__", self._on_callback)
        before(kind, "on_validation_end", self._on_validation_end)

    def _on_log(self, module: Any, name: str, value: Any, *_: Any, **kwargs: Any) -> None:
        is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        on_step = kwargs.get("on_step")
        event = self.recorder.add(
            "log",
            name=name,
            value=float(torch.as_tensor(value).detach()) if is_number else None,
            gradients=torch.is_grad_enabled(),
            at_once=is_number and (torch.is_grad_enabled() if on_step is None else bool(on_step)),
            sync_dist=bool(kwargs.get("sync_dist") and not kwargs.get("rank_zero_only")),
            batch_size=kwargs.get("batch_size"),
            reduce_fx=str(kwargs.get("reduce_fx", "mean")),
        )
        if not event["gradients"]:
            self._logged[name] = event["place"]

    def _on_validation_end(self, callback: Any, trainer: Any, *_: Any) -> None:
        """Records the metrics of a validation, which the program may print nowhere."""
        # Each rank asks for them, which may need the others.
        metrics = trainer.callback_metrics
        if trainer.sanity_checking or self.recorder.rank or self._told.setdefault(trainer, callback) is not callback:
            return
        for name, value in metrics.items():
            place = self._logged.get(logged_name(name))
            if place is not None and value.numel() == 1:
                values = [(float(value), abs(float(value)) * 1e-6, "")]
                self.recorder.add("reported", key=name, values=values, name=name, place=place, by_trainer=True)

    def _on_predict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records the numbers that a prediction returns first, such as indices, and the rows of what it writes."""
        begun = len(self.recorder.events)
        event = self.recorder.add("predict", error="", first=[])
        self.recorder.predicts = True
        try:
            outputs = original(*args, **kwargs)
        except Exception as error:
            event["error"] = f"{type(error).__name__}: {error}"[:200]
            raise
        finally:
            self.recorder.predicts = False
        for batch in outputs or ():
            leaf = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), None)
            event["first"] += [] if leaf is None or leaf.is_floating_point() else leaf.flatten().tolist()
        for other in self.recorder.events[begun:]:
            if other["kind"] == "open":
                other["rows"] = rows_of_file(Path(other["path"]))
        return outputs

    def _on_trainer(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
        given = _given(original, args, kwargs)
        if not given.get("fast_dev_run"):
            limit, steps = given.get("limit_train_batches"), self.spec.most_steps
            most = steps * int(given.get("accumulate_grad_batches") or 1)
            # A share of the batches is not known yet; a smaller number of them is the user's.
            given["limit_train_batches"] = min(limit, most) if type(limit) is int else most
            self._limits[trainer] = 1.0 if limit is None else limit
            if isinstance(given.get("val_check_interval"), int):
                given["val_check_interval"] = min(given["val_check_interval"], given["limit_train_batches"])
        self.recorder.add("trainer")
        original(trainer, **given)

    def _on_callback(self, callback: Any, *args: Any, **kwargs: Any) -> None:
        if name := _given(type(callback).__init__, args, kwargs).get("monitor"):
            self.recorder.add("monitor", name=str(name))


def _given(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a method by name, without the object."""
    return {**dict(zip(list(inspect.signature(function).parameters)[1:], args, strict=False)), **kwargs}
