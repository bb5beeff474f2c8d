"""Metrics that are exact for any number of samples on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from lit_mnist.errors import InputError
from lit_mnist.plugins.evaluation.lightning_internals import forms_no_groups, set_update_count, update_count
from lit_mnist.plugins.evaluation.metric_limits import check_exact
from lit_mnist.plugins.evaluation.metric_states import metrics_in, plain_attributes, states_of_all_ranks


class ExactMetric(Metric):
    """A metric over all samples of all ranks, which counts them; `exact_metric` makes it.

    It is updated with the arguments of the function or of the torchmetrics object:

        metric = exact_metric(lambda values: values)
        metric.update(torch.tensor([1.0, 2.0]))  # one value per sample, [batch]
        assert int(metric.count) == 2

    Args:
        metric: As of `exact_metric`.
        expected: Number of samples of the data set, which `result` checks.

    Attributes:
        count: Number of samples of this rank since the last reset, int64 [].
        total: Sum of the values of these samples, float64 []; 0 for a torchmetrics object.
    """

    full_state_update = False
    count: torch.Tensor
    total: torch.Tensor

    def __init__(
        self, metric: Metric | MetricCollection | Callable[..., torch.Tensor], expected: int | None = None
    ) -> None:
        # A rank without samples never calls `update`, which invalidates the cache: it would skip the collective.
        super().__init__(compute_with_cache=False)
        self.expected, self._evaluated = expected, 0
        # A MetricCollection and a MetricTracker are no Metric.
        is_metric = isinstance(metric, nn.Module) and hasattr(metric, "update")
        self.metric: Any = metric if is_metric else None
        self._values: Any = None if is_metric else metric
        if isinstance(metric, nn.Module) and is_metric:
            check_exact(metric)
            for part in metric.modules():
                if isinstance(part, MetricCollection):
                    forms_no_groups(part)
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for part in metrics_in(self):
            part.compute_with_cache = False
            # The states are gathered here, not by torchmetrics.
            part.distributed_available_fn = _never
        self._initial = [plain_attributes(part) for part in metrics_in(self)]

    def update(self, *batch: Any, **options: Any) -> None:
        """Adds a batch.

        Args:
            *batch: The arguments of the function or of the metric's `update`; the first tensor or list has a row per
                sample.
            **options: Further arguments.

        Raises:
            InputError: The function does not return one value per sample, or the samples cannot be counted.
        """
        self._add(self.metric.update if self.metric is not None else None, batch, options)

    def forward(self, *batch: Any, **options: Any) -> Any:
        """Adds a batch, and returns the metric of this batch on this rank."""
        # torchmetrics counts the calls of `update`.
        set_update_count(self, update_count(self) + 1)
        return self._add(self.metric, batch, options)

    def _add(self, update: Callable[..., Any] | None, batch: tuple[Any, ...], options: dict[str, Any]) -> Any:
        size = next((len(part) for part in (*batch, *options.values()) if _has_rows(part)), None)
        if size is None and (self.expected is not None or update is None):
            raise InputError("exact_metric counts the rows of the first tensor or list, but the batch has none.")
        if update is not None:
            value = update(*batch, **options)
        else:
            values = self._values(*batch, **options)
            if values.shape != (size,):
                raise InputError(
                    f"The function of exact_metric must return one value per sample, shape ({size},), but it returned "
                    f"shape {tuple(values.shape)}: set reduction='none'."
                )
            self.total += values.detach().double().sum()
            value = values.detach().double().mean()
        self.count += size or 0
        return value

    def compute(self) -> Any:
        """Returns the metric over all ranks; every rank must call it."""
        for part in self.modules():
            if isinstance(part, MetricCollection):
                # Metrics of a group that the user has formed refer to the states of its first one.
                list(part.values(copy_state=True))
        with states_of_all_ranks(metrics_in(self), self._initial):
            self._evaluated = int(self.count)
            return self.metric.compute() if self.metric is not None else self.total / self.count

    def result(self, *, partial: bool = False) -> Any:
        """Returns the metric over all ranks and resets it; every rank must call it, even without samples.

        Args:
            partial: Whether fewer samples than `expected` are accepted, as in Lightning's sanity check.

        Raises:
            InputError: The number of samples over all ranks is not `expected`, or the states of the ranks cannot become
                those of one process.
        """
        value, count = self.compute(), self._evaluated
        self.reset()
        if self.expected is not None and (count > self.expected or (count < self.expected and not partial)):
            raise InputError(
                f"{count} samples were evaluated on all ranks, but `expected` is {self.expected}: a sampler pads or "
                "drops some (use ExactDistributedSampler(..., evaluation=True)), or the data set has another size."
            )
        return value

    def reset(self) -> None:
        """Forgets all samples."""
        super().reset()
        if self.metric is not None:
            self.metric.reset()


def _never() -> bool:
    return False


def _has_rows(part: Any) -> bool:
    return part.ndim > 0 if isinstance(part, torch.Tensor) else isinstance(part, list | tuple)


def exact_metric(
    metric: Metric | MetricCollection | Callable[..., torch.Tensor], expected: int | None = None
) -> ExactMetric:
    """Returns a metric that is exact for any number of samples on each rank, such as that of one process.

    `self.log(..., sync_dist=True)` is not exact: it rounds the ranks' mean number of samples to an integer. A module
    makes the metric in `__init__`, updates it in each `validation_step`, and logs its result at the end of the epoch:

        val_loss = exact_metric(partial(F.cross_entropy, reduction="none"), expected=3)
        val_loss.update(torch.zeros(3, 10), torch.tensor([1, 2, 3]))  # logits [batch, classes], targets [batch]
        val_loss.result()  # log(10), a float64 scalar, on any number of ranks

    Args:
        metric: A torchmetrics object or a MetricCollection, or a function that returns one value per sample, [batch],
            whose mean is computed in double precision.
        expected: Number of samples of the data set, which `result` checks.

    Raises:
        InputError: The torchmetrics object has samples already, or cannot be exact on several ranks: see
            docs/torchmetrics.md.
    """
    return ExactMetric(metric, expected)
