"""All uses of private parts of torchmetrics in an evaluation, each with the test that detects a change in them.

1. `state_reductions`, `update_count`, `set_update_count`: the states of a metric, and how those of the ranks become one.
   Detected by `test_the_private_parts_of_torchmetrics` in tests/plugins/test_exact_metric.py.
2. `forms_no_groups`: the metrics of a collection that share their states. Detected by
   `test_a_collection_whose_metrics_begin_alike`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def state_reductions(metric: Metric) -> dict[str, tuple[str, Callable[..., Any] | None]]:
    """Returns for each state how the states of the ranks become one: sum, mean, max, min, cat, none or custom.

    Returns:
        The kind and the function, by the name of the state.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    kinds = {dim_zero_sum: "sum", dim_zero_mean: "mean", dim_zero_max: "max", dim_zero_min: "min", dim_zero_cat: "cat"}
    return {
        name: ("none" if reduce is None else kinds.get(reduce, "custom"), reduce)
        for name, reduce in metric._reductions.items()
    }


def update_count(metric: Metric) -> int:
    """Returns how often a metric was updated since its last reset."""
    return metric._update_count


def set_update_count(metric: Metric, count: int) -> None:
    """Sets how often a metric was updated."""
    metric._update_count = count


def forms_no_groups(collection: MetricCollection) -> None:
    """Makes each metric of a collection keep its own states.

    By default, metrics whose states are equal after the first batch share them from there on. With few samples, unlike
    metrics are equal by chance: on one rank, and not on another.
    """
    if collection._enable_compute_groups is True:
        collection._enable_compute_groups = False
