"""The private parts of Lightning that call hooks, keep logged values, and decide what a step does.

A change of the hooks is detected by the tests of `tests/plugins/test_hooks.py`, one of the logged values by those of
`tests/plugins/test_logged_values.py`, and one of the others by those of `tests/plugins/test_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torchmetrics import Metric

from lit_mnist.distributed.rank import call_with_deep_stack, keep_memory

# A module's hooks of a batch that do nothing unless it has its own.
EMPTY_HOOKS = frozenset(
    {
        *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end"),
        *("on_test_batch_start", "on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end"),
    }
)
_NAME = "_current_fx_name"
# The attribute of a Trainer whose unused hooks are skipped.
_USED_ONLY = "_calls_used_hooks_only"


def quicken(trainer: Any) -> None:
    """Removes from a Trainer's steps what has no effect there; see the functions below."""
    call_used_hooks_only(trainer)
    keep_logged_values_in_place(trainer)
    choose_data_hooks_once(trainer)
    ask_for_validation_when_due(trainer)
    trainer._run_stage = partial(_run_stage, trainer._run_stage)


def _run_stage(run: Any) -> Any:
    if run.__self__.strategy.root_device.type == "cpu":
        keep_memory()
    # Lightning's frames fill a chunk of CPython's, and a step makes calls across its end.
    return call_with_deep_stack(run)


def call_used_hooks_only(trainer: Any) -> None:
    """Makes a Trainer skip the hooks that neither a callback nor the module has, as long as nothing is profiled.

    In each step, Lightning calls each hook of each callback within a context for the profiler, and sets an attribute of
    the module before and after each of them, for which torch compares types. Other Trainers are not changed.
    """
    for name, used in (
        ("_call_callback_hooks", _call_callbacks),
        ("_call_lightning_module_hook", _call_module),
        ("_call_strategy_hook", _call_strategy),
    ):
        original = getattr(call, name)
        if not isinstance(original, partial):
            setattr(call, name, partial(used, original))
    setattr(trainer, _USED_ONLY, True)


def _is_quick(trainer: Any) -> bool:
    return _USED_ONLY in trainer.__dict__ and trainer.profiler.__class__.__name__ == "NoProfiler"


def _call_callbacks(
    original: Callable[..., None],
    trainer: Any,
    hook_name: str,
    *args: Any,
    monitoring_callbacks: bool | None = None,
    **kwargs: Any,
) -> None:
    if monitoring_callbacks is not None or not _is_quick(trainer):
        return original(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
    empty = getattr(Callback, hook_name)
    module = own = before = None
    # A callback may add a hook to itself, or to the list of callbacks, while it runs.
    for callback in trainer.callbacks:
        if getattr(callback.__class__, hook_name) is empty and hook_name not in callback.__dict__:
            continue
        if own is None:
            module = trainer.lightning_module
            own = {_NAME: None} if module is None else module.__dict__
            before, own[_NAME] = own[_NAME], hook_name
        if callable(hook := getattr(callback, hook_name)):
            hook(trainer, module, *args, **kwargs)
    if own is not None:
        own[_NAME] = before
    return None


def _call_module(
    original: Callable[..., Any],
    trainer: Any,
    hook_name: str,
    *args: Any,
    pl_module: Any = None,
    **kwargs: Any,
) -> Any:
    module = trainer.lightning_module if pl_module is None else pl_module
    if module is None or not _is_quick(trainer):
        return original(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    own, kind = module.__dict__, module.__class__
    if (
        hook_name in EMPTY_HOOKS
        and hook_name not in own
        and getattr(kind, hook_name) is getattr(LightningModule, hook_name)
    ):
        return None
    hook = getattr(module, hook_name)
    if not callable(hook):
        return None
    before, own[_NAME] = own[_NAME], hook_name
    output = hook(*args, **kwargs)
    own[_NAME] = before
    return output


def _call_strategy(original: Callable[..., Any], trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if not _is_quick(trainer):
        return original(trainer, hook_name, *args, **kwargs)
    strategy = trainer.strategy
    own, hook = strategy.lightning_module.__dict__, getattr(strategy, hook_name)
    before, own[_NAME] = own[_NAME], hook_name
    output = hook(*args, **kwargs) if callable(hook) else None
    own[_NAME] = before
    return output


def choose_data_hooks_once(trainer: Any) -> None:
    """Makes a Trainer choose once between the module and the datamodule for the hooks that move a batch.

    Lightning compares their functions three times per batch. A hook that is set on one of the two objects later counts.
    """
    connector = trainer._data_connector
    connector.attach_datamodule = partial(_attach_datamodule, connector, connector.attach_datamodule)


def _attach_datamodule(connector: Any, attach: Callable[..., None], model: Any, datamodule: Any = None) -> None:
    attach(model, datamodule=datamodule)
    selector = connector._datahook_selector
    selector.get_instance = _ChosenOnce(selector.get_instance, model, datamodule)


class _ChosenOnce:
    """Remembers which of a module and a datamodule has a hook, until one of the two gets the hook as an attribute."""

    def __init__(self, choose: Callable[[str], Any], module: Any, datamodule: Any) -> None:
        self._choose, self._module, self._datamodule = choose, module, datamodule
        self._known: dict[Any, Any] = {}

    def __call__(self, name: str) -> Any:
        of_data = () if self._datamodule is None else self._datamodule.__dict__
        key = name, name in self._module.__dict__, name in of_data
        if key not in self._known:
            self._known[key] = self._choose(name)
        return self._known[key]


def ask_for_validation_when_due(trainer: Any) -> None:
    """Makes a Trainer decide by the number of the batch whether it may validate, before it looks for what to validate.

    After each step, Lightning compares functions to find out whether there is a validation.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._should_check_val_fx = partial(_should_check, trainer, loop.batch_progress, loop._should_check_val_fx)


def _should_check(trainer: Any, progress: Any, check: Callable[[Any], bool], fetcher: Any) -> bool:
    every = trainer.val_check_batch
    if (
        isinstance(every, int)
        and progress.current.ready % every
        and not progress.is_last_batch
        and not trainer.should_stop
        and trainer.check_val_every_n_epoch is not None
        and trainer._val_check_time_interval is None
    ):
        return False
    return bool(check(fetcher))


def keep_logged_values_in_place(trainer: Any) -> None:
    """Makes `self.log` leave a value where it is if it is on the right device already.

    In each call, Lightning moves the value of the steps before to the device of the new one, for which it copies all
    its metadata. That takes four fifths of the call.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results = _Results(training=loop is epoch_loop)


class _Results(_ResultCollection):
    def __setitem__(self, key: str, value: _ResultMetric) -> None:
        value.__class__ = _Result
        super().__setitem__(key, value)


class _Result(_ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> _ResultMetric:  # type: ignore[override]
        values = list(self.__dict__.values())
        if len(args) != 1 or kwargs or not all(_is_on(args[0], each) for each in values):
            return super().to(*args, **kwargs)
        for each in values:
            if isinstance(each, Metric):
                each.to(args[0])
        return self


def _is_on(device: torch.device, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device == device
    if isinstance(value, dict | list):
        return all(_is_on(device, each) for each in (value.values() if isinstance(value, dict) else value))
    return True
