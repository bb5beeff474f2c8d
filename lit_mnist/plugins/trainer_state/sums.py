"""What a training adds up over an epoch: the sums of logged values and the states of torchmetrics objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lit_mnist.errors import InputError
from lit_mnist.plugins.evaluation.lightning_internals import set_update_count, state_reductions, update_count

_ELEMENTWISE: dict[str, Any] = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}


def save_metrics(module: nn.Module) -> dict[str, Any]:
    """Returns the states of the torchmetrics objects that have been updated since their last reset, by their path."""
    return {
        path: {
            "states": dict(metric.metric_state),
            "kinds": {name: kind for name, (kind, _) in state_reductions(metric).items()},
            "updates": update_count(metric),
        }
        for path, metric in _metrics(module).items()
        if update_count(metric)
    }


def load_metrics(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restores the states that `save_metrics` has returned."""
    metrics = _metrics(module)
    for path, row in saved.items():
        if path in metrics:
            for name, value in row["states"].items():
                setattr(metrics[path], name, value)
            set_update_count(metrics[path], row["updates"])


def merge_metrics(rows: Sequence[Mapping[str, Any]], *, is_first: bool) -> dict[str, Any]:
    """Returns the states of one rank of another number of ranks: the first one continues those of all.

    Args:
        rows: What `save_metrics` has returned on each rank.
        is_first: Whether this is rank 0.

    Raises:
        InputError: There is a state that cannot be merged; all ranks raise it.
    """
    merged = {}
    for path in dict.fromkeys(path for row in rows for path in row):
        present = [row[path] for row in rows if path in row]
        states = {
            name: _merge_state(f"{path}.{name}", kind, [each["states"][name] for each in present])
            for name, kind in present[0]["kinds"].items()
        }
        merged[path] = {"states": states, "updates": sum(each["updates"] for each in present)}
    return merged if is_first else {}


def merge_results(rows: Sequence[Mapping[str, Any]], *, is_first: bool) -> dict[str, Any]:
    """Returns the sums of logged values for one rank of another number of ranks.

    The sum of a value that is reduced over the ranks is that of all ranks on rank 0, and zero elsewhere. Of any other
    value, each rank continues the sum of all ranks. On one rank, nothing is reduced: whether a value is, is `undecided`
    until it is logged again.

    Args:
        rows: The results of `TrainerState.save` on each rank.
        is_first: Whether this is rank 0.
    """
    merged = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        present = [row[key] for row in rows if key in row]
        result = {**present[0], "states": dict(present[0]["states"]), "undecided": True}
        states, kind = result["states"], result["reduce_fx"]
        if result["is_tensor"] and result["meta"]["on_epoch"]:
            for name in {"value", "cumulated_batch_size"} & states.keys():
                states[name] = reduce(_ELEMENTWISE[kind], [each["states"][name] for each in present])
                if result["sync"][0] and not is_first and kind in {"sum", "mean"}:
                    states[name] = torch.zeros_like(states[name])
        merged[key] = result
    return merged


def _metrics(module: nn.Module) -> dict[str, Metric]:
    return {path: part for path, part in module.named_modules() if isinstance(part, Metric)}


def _merge_state(place: str, kind: str, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if all(torch.equal(value, values[0]) for value in values) and kind != "sum":
        return values[0]
    if kind == "cat":
        return torch.cat([torch.atleast_1d(value) for value in values])
    if kind in {"sum", "max", "min"}:
        return reduce(_ELEMENTWISE[kind], values)
    raise InputError(
        f"The checkpoint was saved within an epoch by several ranks, whose states {place} of a torchmetrics object "
        "cannot be merged. Resume with the same number of ranks."
    )
