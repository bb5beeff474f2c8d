"""Evaluation in a Trainer that does not depend on the number of ranks, and says where it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import Metric, MetricCollection

from lit_mnist.distributed.gather import all_gather_bytes
from lit_mnist.plugins.evaluation.lightning_internals import (
    EvaluationLoop,
    forms_no_groups,
    new_result,
    result_meta,
    set_computed,
    wrap_prepare_loader,
)
from lit_mnist.plugins.evaluation.loaders import KnownLoaders, exact_loader, inexact_loader
from lit_mnist.plugins.evaluation.metric_limits import inexact_reason
from lit_mnist.plugins.evaluation.metric_states import (
    SavedStates,
    load_states,
    metrics_in,
    plain_attributes,
    save_states,
    states_of_all_ranks,
)
from lit_mnist.plugins.exact_metrics import ExactMetric
from lit_mnist.plugins.plain_values import pack, unpack

_EVALUATIONS = {RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING}
_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


class ExactEvaluation:
    """Makes validation and test of a Trainer exact to the sample on several ranks.

    Each sample is evaluated by exactly one rank. The values that a step logs with `sync_dist=True` are reduced once, at
    the end, from sums over the samples of all ranks. torchmetrics objects are gathered whatever their states are. A
    rank without samples takes part.

    Args:
        trainer: The Trainer, with several ranks.
        splits: Whether the samples of plain loaders are split over the ranks.
    """

    def __init__(self, trainer: Trainer, *, splits: bool) -> None:
        self._trainer, self._splits = trainer, splits
        # The number of samples, or why they are not split exactly.
        self._prepared = KnownLoaders()
        # By the identity of a metric, whose hash changes with its states.
        self._initial: dict[int, tuple[Metric, dict[str, bytes]]] = {}
        self._watched: list[Metric] = []
        self._reasons: list[str] = []
        # By the key of a logged value: whether it is to be reduced, and whether Lightning guessed the batch size.
        self._asked: dict[str, tuple[bool, bool]] = {}
        # The states of the metrics after the last batch of each of several loaders.
        self._kept: dict[int, dict[int, SavedStates]] = {}
        wrap_prepare_loader(trainer, self._prepare)
        for loop in EvaluationLoop.all_of(trainer):
            loop.wrap(self._start, self._end, self._unwatch)

    @property
    def reasons(self) -> list[str]:
        """Why the last evaluation depends on the number of ranks, each with the fix."""
        return list(dict.fromkeys(self._reasons))

    def _prepare(self, stock: Callable[[], object], loader: Any, stage: RunningStage) -> object:
        """Returns the loader of this rank: Lightning's own, unless it is a plain loader of an evaluation."""
        if stage not in _EVALUATIONS:
            return stock()
        reason = inexact_loader(loader, self._trainer)
        is_plain = reason is None and isinstance(loader, DataLoader)
        if not self._splits and is_plain and type(loader.batch_sampler) is BatchSampler:
            reason = "use_distributed_sampler=False lets each rank evaluate all samples: remove it"
        is_exact = reason is None and is_plain and len(loader.dataset) > 0
        prepared: Any = exact_loader(loader, self._trainer) if is_exact else stock()
        if isinstance(prepared, DataLoader):
            self._prepared[prepared] = reason or len(prepared.dataset)  # type: ignore[arg-type]
        return prepared

    def _start(self, loop: EvaluationLoop) -> None:
        """Begins an evaluation: nothing is reduced before its end."""
        self._reasons, self._asked, self._kept = [], {}, {}
        for loader in loop.loaders:
            known = self._prepared.get(loader) if isinstance(loader, DataLoader) else None
            reason = known if known is not None else inexact_loader(loader, self._trainer)
            if isinstance(reason, str):
                self._reasons.append(f"{loop.name}_dataloader: {reason}")
        if loop.limit != 1.0 and not self._trainer.sanity_checking:
            self._reasons.append(f"limit_{loop.name}_batches counts the batches of each rank: remove it")
        self._watch()
        loop.defer(self._log, self._keep_states, lambda: self._merge(loop, at_end=True))

    def _end(self, loop: EvaluationLoop) -> None:
        """Reduces what the steps have logged, on all ranks together."""
        self._merge(loop, at_end=False)
        loop.store()

    def _unwatch(self) -> None:
        """Lets the metrics gather their states as before."""
        for metric in self._watched:
            vars(metric).pop("sync_context", None)
        self._watched = []

    def _watch(self) -> None:
        """Lets the metrics of the module gather their states whatever they are, also those that the user computes."""
        self._unwatch()
        parts = list(self._trainer.lightning_module.modules())
        own = {id(each) for part in parts if isinstance(part, ExactMetric) for each in part.modules()}
        for part in parts:
            if isinstance(part, MetricCollection):
                forms_no_groups(part)
            elif isinstance(part, Metric) and id(part) not in own:
                self._initial.setdefault(id(part), (part, plain_attributes(part)))
                if part.process_group is None and part.dist_sync_fn is None:
                    part.sync_context = MethodType(self._sync_context, part)  # type: ignore[method-assign]
                    self._watched.append(part)
                    load_states(part, save_states(part))

    def _sync_context(self, metric: Metric, **options: Any) -> AbstractContextManager[None]:
        available = options.get("distributed_available") or metric.distributed_available_fn
        if not options.get("should_sync", True) or not available():
            return nullcontext()
        if not options.get("should_unsync", True):
            self._reasons.append(f"{type(metric).__name__} has dist_sync_on_step=True, which uneven ranks ignore")
            return nullcontext()
        if reason := inexact_reason(metric):
            self._reasons.append(reason)
        _, initial = self._initial.get(id(metric), (metric, plain_attributes(metric)))
        return states_of_all_ranks([metric], [initial], self._reasons.append)

    def _keep_states(self, number: int | None) -> None:
        """Keeps the states of the metrics: the steps of the next loader change them."""
        self._kept[-1 if number is None else number] = {id(metric): save_states(metric) for metric in self._watched}

    def _value_of(self, metric: Metric, number: int | None) -> Any:
        """Returns the value of a logged metric over all ranks after a loader."""
        parts = metrics_in(metric)
        self._reasons += [reason for part in parts if (reason := inexact_reason(part))]
        # Of this rank, the last loader up to this one that has had a batch.
        after = self._kept[max(each for each in self._kept if each <= number)] if number is not None else {}
        now = [save_states(part) for part in parts]
        for part, states in zip(parts, now, strict=True):
            load_states(part, after.get(id(part), states))
        value = metric.compute()
        for part, states in zip(parts, now, strict=True):
            load_states(part, states)
        return value

    def _log(self, stock: Callable[..., None], fx: str, name: str, *args: Any, **options: Any) -> None:
        """Logs a value on this rank. With uneven ranks, a reduction here would wait forever."""
        if options["sync_dist_group"] is not None or options["rank_zero_only"]:
            stock(fx, name, *args, **options)
            return
        results: Any = self._trainer._results
        index = results.dataloader_idx if options["add_dataloader_idx"] else None
        key = f"{fx}.{name}" if index is None else f"{fx}.{name}.{index}"
        guessed = options["batch_size"] is None or self._asked.get(key, (False, False))[1]
        self._asked[key] = (options["sync_dist"], guessed)
        stock(fx, name, *args, **{**options, "sync_dist": False})

    def _merge(self, loop: EvaluationLoop, *, at_end: bool) -> None:
        """Sets the values that were logged to those of all ranks.

        Args:
            loop: The loop.
            at_end: Whether the values are those that the hooks at the end of the epoch have logged.
        """
        rows = {key: self._row(key, loop.results[key]) for key in self._asked if loop.results[key].meta.on_epoch}
        everyone = [unpack(part, torch.device("cpu")) for part in all_gather_bytes(pack(rows))]
        for key in dict.fromkeys(key for rank in everyone for key in rank):
            present = [rank[key] for rank in everyone if key in rank]
            if key not in loop.results:
                loop.results[key] = new_result(present[0]["meta"], present[0]["is_tensor"], self._trainer)
            result = loop.results[key]
            result.has_reset = False
            if not present[0]["is_tensor"]:
                set_computed(result, self._value_of(result.value, present[0]["meta"]["dataloader_idx"]))
                continue
            if len(present) < len(everyone) and not at_end and not present[0]["sync"]:
                self._reasons.append(_unsynced(present[0]["meta"]["name"]))
            merged = self._reduced(loop, present, at_end=at_end)
            if not present[0]["sync"] and key in rows:
                merged = _value_of(rows[key])
            set_computed(result, merged.to(present[0]["value"].dtype).to(self._trainer.strategy.root_device))
        self._asked = {}

    def _row(self, key: str, result: Any) -> dict[str, Any]:
        sync, guessed = self._asked[key]
        row = {"meta": result_meta(result), "is_tensor": result.is_tensor, "sync": sync, "guessed": guessed}
        if result.is_tensor:
            row |= {"value": result.value, "size": getattr(result, "cumulated_batch_size", None)}
        return row

    def _reduced(self, loop: EvaluationLoop, rows: list[dict[str, Any]], *, at_end: bool) -> torch.Tensor:
        """Returns the value of all ranks, and notes why it is not exact."""
        meta, own = rows[0]["meta"], [_value_of(row) for row in rows]
        name, is_same = meta["name"], all(torch.equal(value, own[0]) for value in own)
        if not rows[0]["sync"]:
            if not is_same:
                self._reasons.append(_unsynced(name))
            return own[0]
        values = torch.stack([row["value"] for row in rows]).double()
        if meta["reduce_fx"] != "mean":
            return _REDUCE[meta["reduce_fx"]](values)
        if at_end:
            if is_same:
                return own[0]
            self._reasons.append(
                f"{name} is logged by {meta['fx']}, as the mean of what each rank has computed from its own samples: "
                "log it in the step, or use exact_metric"
            )
        sizes = torch.stack([row["size"] for row in rows]).sum()
        expected = self._samples(loop, meta["dataloader_idx"] or 0)
        if not at_end and any(row["guessed"] for row in rows) and expected not in (None, int(sizes)):
            self._reasons.append(
                f"{name} is logged with batch sizes that Lightning has guessed: their sum is {int(sizes)}, but there "
                f"are {expected} samples. Pass batch_size to self.log"
            )
        return values.sum(0) / sizes

    def _samples(self, loop: EvaluationLoop, number: int) -> int | None:
        """Returns the number of samples of an exact loader that is evaluated as a whole."""
        loader = loop.loaders[number] if number < len(loop.loaders) else None
        if self._trainer.sanity_checking or loop.limit != 1.0 or not isinstance(loader, DataLoader):
            return None
        known = self._prepared.get(loader)
        return known if isinstance(known, int) else None


def _value_of(row: dict[str, Any]) -> torch.Tensor:
    return row["value"] if row["size"] is None else row["value"] / row["size"]


def _unsynced(name: str) -> str:
    return f"{name} is logged without sync_dist=True, so it is the value of the samples of rank 0: set it"
