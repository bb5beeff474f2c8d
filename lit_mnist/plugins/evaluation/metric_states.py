"""The states of torchmetrics objects over all ranks, whatever their shapes, dtypes and lengths.

torchmetrics gathers with collectives that need the same number of tensors, dimensions and dtypes on each rank, which a
rank without samples does not have. Here each rank sends its states as bytes, in the safetensors format, and all ranks
set the states that one process with all samples would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from lit_mnist.distributed.gather import all_gather_bytes
from lit_mnist.errors import InputError
from lit_mnist.plugins.evaluation.lightning_internals import (
    forget_computed,
    set_update_count,
    state_reductions,
    update_count,
)
from lit_mnist.plugins.plain_values import NotPlainError, pack, unpack

_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def metrics_in(module: nn.Module) -> list[Metric]:
    """Returns a metric and the metrics in it, in an order that is the same on all ranks."""
    return [part for part in module.modules() if isinstance(part, Metric)]


def plain_attributes(metric: Metric) -> dict[str, bytes]:
    """Returns the plain values, tensors and buffers that a metric keeps beside its states, packed."""
    found = {}
    for name, value in {**vars(metric), **dict(metric.named_buffers(recurse=False))}.items():
        if name not in metric.metric_state and name not in _OF_EVERY_METRIC:
            with suppress(NotPlainError):
                found[name] = pack(value)
    return found


class _Bare(Metric):
    def update(self) -> None:
        """Has no samples."""

    def compute(self) -> None:
        """Has no value."""


_OF_EVERY_METRIC = frozenset(vars(_Bare()))
_MISSING = object()
# A sum that no value is computed from.
_UNUSED = {("RootMeanSquaredErrorUsingSlidingWindow", "rmse_map")}


SavedStates = tuple[dict[str, Any], int]


def save_states(metric: Metric) -> SavedStates:
    """Returns copies of the states of a metric, and its number of updates."""
    states = {
        name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in metric.metric_state.items()
    }
    return states, update_count(metric)


def load_states(metric: Metric, saved: SavedStates) -> None:
    """Restores what `save_states` has returned. The next value is computed again."""
    for name, value in saved[0].items():
        setattr(metric, name, value)
    set_update_count(metric, saved[1])
    forget_computed(metric)


def _reject(message: str) -> None:
    raise InputError(message)


@contextmanager
def states_of_all_ranks(
    metrics: list[Metric], initial: list[dict[str, bytes]], report: Callable[[str], None] = _reject
) -> Iterator[None]:
    """Sets the states of metrics to those of all ranks within the body.

    Every rank must enter it, even if it has no samples. The order of the samples is that of the ranks.

    Args:
        metrics: The metrics.
        initial: Their attributes before any update, by `plain_attributes`.
        report: Is called with a message if the result is not exact; by default, all ranks raise it together.

    Raises:
        InputError: A state cannot be sent, or those of the ranks cannot become one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    parts = [unpack(part, torch.device("cpu")) for part in all_gather_bytes(_pack_states(metrics, initial))]
    for message in (part["error"] for part in parts if "error" in part):
        raise InputError(message)
    before = [(metric, dict(metric.metric_state), update_count(metric)) for metric in metrics]
    created: list[tuple[Metric, str, Any]] = []
    try:
        for number, metric in enumerate(metrics):
            _set_merged(metric, [part["metrics"][number] for part in parts], created, report)
        yield
    finally:
        for metric, states, count in before:
            for name, value in states.items():
                setattr(metric, name, value)
            set_update_count(metric, count)
        for metric, name, value in created:
            if value is _MISSING:
                delattr(metric, name)
            else:
                setattr(metric, name, value)


def _pack_states(metrics: list[Metric], initial: list[dict[str, bytes]]) -> bytes:
    """Returns the states of this rank, or an error for all ranks: the others would wait for one that raises."""
    rows = []
    for metric, first in zip(metrics, initial, strict=True):
        attributes = [name for name, content in plain_attributes(metric).items() if first.get(name) != content]
        rows.append(
            {
                "states": metric.metric_state,
                "kinds": {name: kind for name, (kind, _) in state_reductions(metric).items()},
                "updates": update_count(metric),
                "attributes": {name: getattr(metric, name) for name in attributes},
            }
        )
        try:
            pack(rows[-1]["states"])
        except NotPlainError as error:
            return pack({"error": f"{type(metric).__name__} has a {error} in a state, which cannot be gathered."})
    return pack({"metrics": rows})


def _set_merged(
    metric: Metric,
    parts: list[dict[str, Any]],
    created: list[tuple[Metric, str, Any]],
    report: Callable[[str], None],
) -> None:
    """Sets the states and attributes of one metric.

    Args:
        metric: The metric.
        parts: What each rank has sent.
        created: Receives what is no state of this rank: the metric, the name, and the value or `_MISSING`.
        report: Is called with a message if the result is not exact.
    """
    owner, own = type(metric).__name__, parts[dist.get_rank()]
    # A rank without samples has the initial values, some of which have another shape or are no neutral element.
    # A wrapper does not count its updates.
    used = [part for part in parts if part["updates"]] or (parts if isinstance(metric, WrapperMetric) else parts[:1])
    functions = {name: function for name, (_, function) in state_reductions(metric).items()}
    for name, kind in used[0]["kinds"].items():
        if name not in own["kinds"]:
            # The metric adds its states in its first update.
            created.append((metric, name, _MISSING))
        values = [part["states"][name] for part in used]
        if kind == "mean" and not all(torch.equal(value, values[0]) for value in values):
            report(f"{owner} averages its state {name} over the ranks, which is not exact.")
        setattr(metric, name, _to(_merged(kind, functions.get(name), values), metric.device))
    for name in sorted({name for part in parts for name in part["attributes"]}):
        values = [part["attributes"][name] for part in parts if name in part["attributes"]]
        missing = any(part["updates"] and name not in part["attributes"] for part in parts)
        if (owner, name) not in _UNUSED and (missing or len({pack(value) for value in values}) > 1):
            report(
                f"{owner} keeps {name} outside of its states, and it differs between the ranks: the metric is not "
                "exact on several ranks."
            )
        if name not in own["attributes"]:
            created.append((metric, name, getattr(metric, name, _MISSING)))
            setattr(metric, name, _to(values[0], metric.device))
    set_update_count(metric, sum(part["updates"] for part in parts))


def _merged(kind: str, function: Callable[..., Any] | None, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        merged = [item for value in values for item in value]
        return function(merged) if kind == "custom" and function and len(values) > 1 else merged
    if len(values) == 1 or (kind == "mean" and all(torch.equal(value, values[0]) for value in values)):
        return values[0]
    if kind in _ELEMENTWISE:
        return reduce(_ELEMENTWISE[kind], values)
    if kind == "cat":
        return torch.cat([torch.atleast_1d(value) for value in values])
    stacked = torch.stack(values)
    return function(stacked) if function else stacked


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_to(item, device) for item in value] if isinstance(value, list) else value
