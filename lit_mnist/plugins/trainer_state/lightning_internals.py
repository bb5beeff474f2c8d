"""All uses of private parts of Lightning for the state of a Trainer, with the tests that detect a change in them.

1. `TrainerState`: Lightning's epoch sums of logged values. `test_sums_of_logged_values_are_restored` in
   tests/plugins/test_exact_internals.py.
2. `_decide_when_logged`: how a value is logged. `test_a_user_s_module_resumes_on_any_number_of_ranks` in
   tests/plugins/test_state_is_step.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from lit_mnist.distributed.rank import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainerState:
    """The state of a Trainer that its loops' progress lacks: the epoch sums of logged values, and counters.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        # Of the program: a callback may change it in training.
        self._accumulate = trainer.accumulate_grad_batches

    def save(self) -> dict[str, Any]:
        """Returns the state as nested plain values and tensors."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results
        return {
            "results": {key: _save_result(each) for key, each in results.items() if each.meta._sync._group is None},
            "callback_metrics": dict(connector._callback_metrics),
            "logged_metrics": dict(connector._logged_metrics),
            "first_batch": connector._first_loop_iter,
            "current_fx": connector._current_fx,
            "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "accumulate": trainer.accumulate_grad_batches,
            "accumulate_at_start": self._accumulate,
            "should_stop": trainer.should_stop,
            # Under manual optimization DDP broadcasts the buffers only before the first forward pass.
            "broadcasts": getattr(trainer.strategy.model, "require_forward_param_sync", None),
            "limits": self._limits(),
        }

    def load(self, state: dict[str, Any], *, has_ended: bool) -> None:
        """Restores a state between two batches, or after a training run that continues with raised limits."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results
        for key, saved in state["results"].items():
            results[key] = _load_result(saved, trainer)
        if undecided := {key for key, saved in state["results"].items() if saved.get("undecided")}:
            _decide_when_logged(results, undecided, is_first=trainer.global_rank == 0)
        connector._first_loop_iter, connector._current_fx = state["first_batch"], state["current_fx"]
        trainer.fit_loop.epoch_loop._batches_that_stepped = state["stepped"]
        trainer.accumulate_grad_batches = state["accumulate"]
        if (before := state.get("accumulate_at_start", self._accumulate)) != self._accumulate:
            warn_once(
                f"The program has changed since the training was saved: accumulate_grad_batches is {self._accumulate}, "
                f"was {before}. The resumed training run continues with the value of the checkpoint. To train with "
                "another value, start from its weights."
            )
        trainer.should_stop = state["should_stop"] and not has_ended
        if state["broadcasts"] is not None:
            trainer.strategy.model.require_forward_param_sync = state["broadcasts"]  # type: ignore[union-attr]
        self._load_metrics(state)

    def load_end(self, state: dict[str, Any]) -> None:
        """Restores the last metrics of a training run that has ended, and its early stop if the limits are the same."""
        self._load_metrics(state)
        if state["limits"] == self._limits():
            self.trainer.should_stop = state["should_stop"]

    def _limits(self) -> list[Any]:
        from lightning.pytorch.callbacks import Timer

        timers = [each for each in self.trainer.callbacks if isinstance(each, Timer)]  # type: ignore[attr-defined]
        left = [each.time_remaining() for each in timers]
        return [self.trainer.max_epochs, self.trainer.max_steps, [each is not None and each <= 0 for each in left]]

    def _load_metrics(self, state: dict[str, Any]) -> None:
        connector = self.trainer._logger_connector
        connector._callback_metrics.update(state["callback_metrics"])
        connector._logged_metrics.update(state["logged_metrics"])


_RESULT_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_RESULT_STATES = ("value", "cumulated_batch_size", "has_reset", "_update_count", "_forward_cache")


def _save_result(result: Any) -> dict[str, Any]:
    meta = result.meta
    states = {name: getattr(result, name) for name in _RESULT_STATES if hasattr(result, name)}
    if not result.is_tensor:
        # The value is a torchmetrics object, an attribute of the module.
        states = {"has_reset": result.has_reset, "_update_count": result._update_count}
    return {
        "meta": {name: getattr(meta, name) for name in (*_RESULT_FIELDS, "dataloader_idx", "metric_attribute")},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "is_tensor": result.is_tensor,
        "states": states,
    }


def _load_result(saved: dict[str, Any], trainer: Trainer) -> Any:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

    meta = _Metadata(**saved["meta"], reduce_fx=saved["reduce_fx"])
    should, rank_zero_only = saved["sync"]
    meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = _ResultMetric(meta, saved["is_tensor"])
    for name, value in saved["states"].items():
        setattr(result, name, value)
    if not saved["is_tensor"]:
        result.value = attrgetter(meta.metric_attribute or "")(trainer.lightning_module)
        result._forward_cache = result.value._forward_cache
    return result.to(trainer.strategy.root_device)


def _decide_when_logged(results: Any, undecided: set[str], *, is_first: bool) -> None:
    """Lets the first log of a value after a resume on another number of ranks decide whether it is reduced over them.

    Args:
        results: The logged values.
        undecided: Their keys.
        is_first: Whether this is rank 0, which continues the sums of all ranks if the value is reduced.
    """
    stock = results.log

    def log(fx: str, name: str, *args: Any, sync_dist: bool = False, **options: Any) -> None:
        key = f"{fx}.{name}"
        if key in undecided and key in results:
            undecided.remove(key)
            result, meta = results[key], results[key].meta
            sums = result.is_tensor and meta.on_epoch and (meta.is_mean_reduction or meta.is_sum_reduction)
            if sync_dist and not meta.sync.should and not is_first and sums:
                for part in {"value", "cumulated_batch_size"} & vars(result).keys():
                    setattr(result, part, torch.zeros_like(getattr(result, part)))
            meta.sync.should = sync_dist
        if not undecided:
            vars(results).pop("log", None)
        stock(fx, name, *args, sync_dist=sync_dist, **options)

    results.log = log
