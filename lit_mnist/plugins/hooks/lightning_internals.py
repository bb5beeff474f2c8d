"""The functions of Lightning that call hooks, which are private.

A change of theirs is detected by the tests of `tests/plugins/test_hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer import call

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
    return _USED_ONLY in vars(trainer) and type(trainer.profiler).__name__ == "NoProfiler"


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
    # A callback may add a hook to itself, or to the list of callbacks, while it runs.
    for callback in trainer.callbacks:
        if getattr(type(callback), hook_name) is not empty or hook_name in vars(callback):
            break
    else:
        return None
    module = trainer.lightning_module
    own: dict[str, Any] = vars(module) if module else {_NAME: None}
    before, own[_NAME] = own[_NAME], hook_name
    for callback in trainer.callbacks:
        if callable(hook := getattr(callback, hook_name)):
            hook(trainer, trainer.lightning_module, *args, **kwargs)
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
    module = pl_module or trainer.lightning_module
    if module is None or not _is_quick(trainer):
        return original(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    own = vars(module)
    if hook_name in EMPTY_HOOKS and hook_name not in own and _is_lightnings(type(module), hook_name):
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
    own, hook = vars(trainer.lightning_module), getattr(trainer.strategy, hook_name)
    before, own[_NAME] = own[_NAME], hook_name
    output = hook(*args, **kwargs) if callable(hook) else None
    own[_NAME] = before
    return output


def _is_lightnings(kind: type, hook_name: str) -> bool:
    return getattr(kind, hook_name) is getattr(LightningModule, hook_name)
