"""What the torchmetrics objects of a module add to `result.json` and to the report.

A torchmetrics object, or any other child of a module, may have two methods. `results()` returns the metrics of the last
evaluation as nested plain values, which replace the logged ones in `result.json`: `self.log` does not accept a
confusion matrix. `examples()` returns the samples that the report shows. All ranks call both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule


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


def evaluation_examples(module: LightningModule) -> Sequence[Any]:
    """Returns the samples of the last evaluation that the report shows; every rank must call it."""
    children = [child for child in module.modules() if callable(getattr(child, "examples", None))]
    return [example for child in children for example in child.examples()]  # type: ignore[operator]
