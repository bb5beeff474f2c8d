"""What the torchmetrics objects of a module and the callbacks add to `result.json` and to the report.

A torchmetrics object, or any other child of a module, may have a method `results()`. It returns the metrics of the last
evaluation as nested plain values, which replace the logged ones in `result.json`: `self.log` does not accept a
confusion matrix. A callback may have a method `examples()`, which returns the samples that the report shows. All ranks
call both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer


def evaluation_results(module: LightningModule, logged: Mapping[str, float]) -> Mapping[str, Any] | None:
    """Returns the metrics of the last evaluation for `result.json`; None if nothing was evaluated."""
    if not logged:
        return None
    for child in module.modules():
        if callable(results := getattr(child, "results", None)):
            found: Mapping[str, Any] | None = results()
            if found is not None:
                return found
    return logged


def evaluation_examples(trainer: Trainer) -> Sequence[Any]:
    """Returns the samples of the last evaluation that the report shows; every rank must call it."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning sets it elsewhere
    return [each for callback in callbacks if hasattr(callback, "examples") for each in callback.examples()]
