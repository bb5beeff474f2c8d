"""Which torchmetrics objects cannot be exact on several ranks, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from lit_mnist.errors import InputError, require
from lit_mnist.plugins.evaluation.lightning_internals import state_reductions

_RANDOM = "draws random numbers, so its value is not a function of the samples"
_WINDOW = "keeps the last batches, which depend on the number of ranks"
_GROUPS = "assigns samples to a wrong group if a batch has no sample of a group, even in one process (torchmetrics 1.9)"
_REASONS = {
    "BinaryFairness": _GROUPS,
    "BinaryGroupStatRates": _GROUPS,
    "BootStrapper": _RANDOM,
    "InceptionScore": _RANDOM,
    "KernelInceptionDistance": _RANDOM,
    "MetricTracker": "keeps a metric for each epoch: pass the metric itself to exact_metric",
    "NormalizedRootMeanSquaredError": "combines the states of at most two ranks (torchmetrics 1.9)",
    "PerceptualPathLength": _RANDOM,
    "Running": _WINDOW,
    "RunningMean": _WINDOW,
    "RunningSum": _WINDOW,
}
_RANGE = (lambda metric: metric.data_range is None, "computes data_range from each batch: pass data_range")
# Classes with an argument that makes them inexact.
_REASONS_IF: dict[str, tuple[Callable[[Any], bool], str]] = {
    "CriticalSuccessIndex": (
        lambda metric: metric.keep_sequence_dim is not None,
        "with keep_sequence_dim has a value for each batch",
    ),
    "MultiScaleStructuralSimilarityIndexMeasure": _RANGE,
    "StructuralSimilarityIndexMeasure": _RANGE,
    "MultilabelStatScores": (
        lambda metric: metric.multidim_average == "samplewise",
        "with multidim_average='samplewise' confuses samples and labels if a batch has one sample (torchmetrics 1.9)",
    ),
}
# torchmetrics keeps this argument as a state that it averages, although no sample changes it.
_CONSTANT = {"data_range"}


def check_exact(metric: nn.Module) -> None:
    """Checks that a metric, and the metrics in it, can be exact on several ranks.

    Raises:
        InputError: One of them cannot be, or has samples already.
    """
    for part in metric.modules():
        if isinstance(part, Metric):
            name = type(part).__name__
            # A wrapper does not count its updates; one of them begins with 1.
            used = part.update_called and not isinstance(part, WrapperMetric)
            require(not used, f"{name} has samples already: exact_metric needs a metric without samples.")
        if reason := inexact_reason(part):
            raise InputError(f"{reason}.")


def inexact_reason(metric: nn.Module) -> str | None:
    """Returns why a metric cannot be exact on several ranks, or None."""
    name = type(metric).__name__
    if isinstance(metric, Metric | MetricTracker) and (reason := _reason_of_class(metric)):
        return f"{name} {reason}. It cannot be exact on several ranks"
    if not isinstance(metric, Metric):
        return None
    for state, (kind, function) in state_reductions(metric).items():
        is_mean = kind == "mean" or (kind == "custom" and _averages(function, getattr(metric, state)))
        if is_mean and state not in _CONSTANT:
            return (
                f"{name} averages its state {state} over the ranks, which is not exact if they have different numbers "
                "of samples"
            )
    if metric.process_group is not None:
        return f"{name} has a process_group, but all ranks are to be combined"
    if metric.dist_sync_fn is not None:
        return f"{name} has a dist_sync_fn, but its states are to be gathered without it"
    return None


def _reason_of_class(metric: nn.Module) -> str | None:
    """Returns why a metric, or the class of torchmetrics that it derives from, is not exact."""
    for each in type(metric).__mro__:
        if not each.__module__.startswith("torchmetrics."):
            continue
        if each.__name__ in _REASONS:
            return _REASONS[each.__name__]
        condition, reason = _REASONS_IF.get(each.__name__, (None, ""))
        if condition and condition(metric):
            return reason
    return None


def _averages(function: Any, state: Any) -> bool:
    """Returns whether a function of the user's takes 1 and 3 for 2."""
    if not isinstance(state, Tensor) or not state.is_floating_point():
        return False
    try:
        return torch.equal(function(torch.stack([state * 0 + 1, state * 0 + 3])), state * 0 + 2)
    except Exception:
        # It wants other values.
        return False
