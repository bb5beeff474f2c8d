"""All uses of private parts of Lightning, each with the test that detects a change in Lightning.

1. `disable_signal_handling`: the SIGTERM handler and the broadcast in each step. Detected by
   `test_lightning_does_not_handle_signals` in tests/faults/test_signals.py.
2. `inspect_signature_once`: the arguments of `training_step`. Detected by
   `test_the_signature_of_a_training_step_is_inspected_once` in tests/test_template.py.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def disable_signal_handling(trainer: Trainer) -> None:
    """Disables the signal handlers of a Trainer, and its check for signals in each step.

    Lightning's SIGTERM handler calls a collective, which hangs if the other ranks do not, and each step costs a
    broadcast. `STOP` and `Consensus` replace both.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def inspect_signature_once(trainer: Trainer) -> None:
    """Makes a Trainer inspect the signature of `training_step` once per module class instead of in each step."""
    loop = trainer.fit_loop.epoch_loop
    inspect, known = loop._build_kwargs, dict[Any, bool]()

    def build(kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        module = type(trainer.lightning_module)
        if module not in known:
            known[module] = "batch_idx" in inspect(OrderedDict(), batch, batch_idx)
        kwargs["batch"] = batch
        if known[module]:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    loop._build_kwargs = build  # type: ignore[method-assign]


def uses_dataloader_iter(module: Any) -> bool:
    """Returns whether a training step takes the iterator instead of a batch."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


class TrainerState:
    """What a Trainer keeps beside its loops' progress: the sums of logged values, and counters."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._waiting: dict[str, Any] = {}

    @property
    def prefetches(self) -> int:
        fetcher = self.trainer.fit_loop._data_fetcher
        return 1 if fetcher is not None and fetcher.length is None else 0

    def save(self) -> dict[str, Any]:
        self.merge()
        results = {}
        loop = self.trainer.fit_loop.epoch_loop
        for key, metric in loop._results.items():
            if metric.is_tensor and metric.meta.on_epoch:
                results[key] = {n: getattr(metric, n) for n in metric._defaults}
                results[key]["has_reset"] = metric.has_reset
                results[key]["updates"] = metric._update_count
        results |= self._waiting
        connector = self.trainer._logger_connector
        return {
            "results": results,
            "callback_metrics": {k: v for k, v in connector._callback_metrics.items()},
            "stepped": loop._batches_that_stepped,
            "should_stop": self.trainer.should_stop,
            "first": connector._first_loop_iter,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._waiting = dict(state["results"])
        # Until its end a resumed epoch does not step schedules that follow a metric.
        self.trainer.fit_loop.restarting = False
        self.trainer._logger_connector._callback_metrics.update(state["callback_metrics"])
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = state["stepped"]
        self.trainer.should_stop = state["should_stop"]

    def merge(self) -> None:
        for key, metric in self.trainer.fit_loop.epoch_loop._results.items():
            saved = self._waiting.pop(key, None)
            if saved is None or saved["has_reset"]:
                continue
            for name in metric._defaults:
                new, old = getattr(metric, name), saved[name].to(getattr(metric, name).device)
                if name == "value" and (metric.meta.is_max_reduction or metric.meta.is_min_reduction):
                    setattr(metric, name, metric.meta.reduce_fx(old, new))
                else:
                    setattr(metric, name, old + new)
            metric._update_count += saved["updates"]
