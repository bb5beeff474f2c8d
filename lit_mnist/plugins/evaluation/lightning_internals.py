"""All uses of private parts of torchmetrics, torch and Lightning in an evaluation, each with its detecting test.

1. `state_reductions`, `update_count`, `set_update_count`: the states of a metric, and how they are reduced. Detected
   by `test_the_private_parts_of_torchmetrics` in tests/plugins/test_exact_metric.py.
2. `forms_no_groups`: the metrics of a collection that share their states. Detected by
   `test_a_collection_whose_metrics_begin_alike`.
3. `copied_loader`, `wrap_prepare_loader`, `EvaluationLoop`, `set_computed`, `forget_computed`, `new_result`,
   `result_meta`: the loaders of an evaluation, and its logged values. Detected by
   `test_an_evaluation_is_exact_to_the_sample` in tests/plugins/test_exact_evaluation.py.
4. `predicted_loader`: as Lightning splits the samples of a prediction. Detected by
   `test_a_loader_with_positional_arguments_is_predicted` in the same file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import RunningStage
    from torch.utils.data import DataLoader
    from torchmetrics import Metric, MetricCollection


def state_reductions(metric: Metric) -> dict[str, tuple[str, Callable[..., Any] | None]]:
    """Returns for each state how the states of the ranks become one: sum, mean, max, min, cat, none or custom.

    Returns:
        The kind and the function, by the name of the state.
    """
    from torchmetrics import utilities

    kinds: dict[Any, str] = {
        getattr(utilities, f"dim_zero_{kind}"): kind for kind in ("sum", "mean", "max", "min", "cat")
    }
    reductions: dict[str, Any] = metric._reductions
    return {
        name: ("none" if reduce is None else kinds.get(reduce, "custom"), reduce) for name, reduce in reductions.items()
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


def copied_loader(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with another batch sampler.

    It is not constructed: the constructor of a subclass may have any arguments.
    """
    copied = copy.copy(loader)
    vars(copied).update(
        batch_sampler=batch_sampler, sampler=getattr(batch_sampler, "sampler", batch_sampler), drop_last=False
    )
    # Workers that persist are those of the other loader.
    vars(copied)["_iterator"] = None
    return copied


def wrap_prepare_loader(trainer: Trainer, prepare: Callable[[Callable[..., Any], object, Any], object]) -> None:
    """Makes a function prepare the loaders of a Trainer.

    Args:
        trainer: The Trainer.
        prepare: Takes Lightning's own function, without its first argument; the loader; and the stage.
    """
    connector = trainer._data_connector
    wrapped = partial(_prepare, prepare, connector._prepare_dataloader)
    connector._prepare_dataloader = wrapped  # type: ignore[method-assign]


def _prepare(prepare: Any, stock: Any, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
    prepared: object = prepare(partial(stock, dataloader, shuffle=shuffle, mode=mode), dataloader, mode)
    return prepared


def predicted_loader(loader: DataLoader[Any], trainer: Trainer) -> DataLoader[Any]:
    """Returns a copy of a loader for a prediction, whose samples are split as Lightning splits them."""
    from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper

    sampler: Any = loader.sampler
    if trainer.world_size > 1:
        size, rank = trainer.world_size, trainer.global_rank
        sampler = UnrepeatedDistributedSamplerWrapper(sampler, num_replicas=size, rank=rank, shuffle=False)
    batches = BatchSampler(sampler, loader.batch_size or 1, drop_last=False)
    return copied_loader(loader, _IndexBatchSamplerWrapper(batches))


class EvaluationLoop:
    """The private parts of an evaluation loop of Lightning.

    Args:
        trainer: The Trainer.
        loop: One of its loops for validation or test.
    """

    def __init__(self, trainer: Trainer, loop: Any) -> None:
        self.trainer, self._loop = trainer, loop
        self._stock_start, self._stock_end = loop.on_run_start, loop.on_run_end

    @staticmethod
    def all_of(trainer: Trainer) -> list[EvaluationLoop]:
        """Returns the loops for validation and test, also that in a fit."""
        loops = (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop)
        return [EvaluationLoop(trainer, loop) for loop in loops]

    @property
    def results(self) -> dict[str, Any]:
        """The logged values, by key."""
        return self._loop._results

    @property
    def loaders(self) -> list[Any]:
        """The loaders of this rank."""
        return list(self._loop._combined_loader.flattened)

    @property
    def name(self) -> str:
        """`val` or `test`."""
        return self._loop._stage.dataloader_prefix

    @property
    def limit(self) -> float:
        """The share or number of batches of a rank that are evaluated."""
        return getattr(self.trainer, f"limit_{self.name}_batches")

    def wrap(
        self,
        start: Callable[[EvaluationLoop], None],
        end: Callable[[EvaluationLoop], None],
        after: Callable[[], None],
    ) -> None:
        """Calls functions before an evaluation begins, after its last batch on each rank, and after its hooks."""
        self._start, self._end, self._after = start, end, after
        self._loop.on_run_start, self._loop.on_run_end = self._on_run_start, self._on_run_end

    def _on_run_start(self) -> None:
        self._restore()
        self._start(self)
        self._stock_start()
        self._broadcast_buffers()

    def _on_run_end(self) -> Any:
        try:
            self._end(self)
            return self._stock_end()
        finally:
            self._restore()
            self._after()

    def defer(
        self, log: Callable[..., None], loader_ended: Callable[[int | None], None], merge: Callable[[], None]
    ) -> None:
        """Lets nothing be reduced over the ranks before all of them have ended their last batch.

        Args:
            log: Takes Lightning's own function and the arguments of a logged value.
            loader_ended: Takes the number of the last loader of which this rank had a batch.
            merge: Is called by all ranks once the hooks at the end of the epoch have logged their values.
        """
        results: Any = self._loop._results
        connector = self.trainer._logger_connector
        stock_log, stock_epoch_end = results.log, connector.on_epoch_end
        self._loop._store_dataloader_outputs = lambda: loader_ended(results.dataloader_idx)
        results.log = lambda *args, **options: log(stock_log, *args, **options)

        def on_epoch_end() -> None:
            if self.trainer._results is results:
                merge()
            stock_epoch_end()

        connector.on_epoch_end = on_epoch_end  # type: ignore[method-assign]

    def store(self) -> None:
        """Stores the values of each loader, once `merge` has set them."""
        loop = self._loop
        vars(loop).pop("_store_dataloader_outputs", None)
        several = loop._is_sequential and loop.num_dataloaders > 1
        for number in range(loop.num_dataloaders if several else 1):
            loop._results.dataloader_idx = number if several else None
            loop._store_dataloader_outputs()

    def _restore(self) -> None:
        vars(self._loop).pop("_store_dataloader_outputs", None)
        vars(self._loop._results).pop("log", None)
        vars(self.trainer._logger_connector).pop("on_epoch_end", None)

    def _broadcast_buffers(self) -> None:
        """Does what DDP does before the first batch of an evaluation: a rank without a batch must also take part."""
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            if model._check_sync_bufs_pre_fwd():
                model._sync_buffers()
            model.require_forward_param_sync = False


def set_computed(result: Any, value: Any) -> None:
    """Sets the value of a logged result for this epoch."""
    result._computed = value


def forget_computed(metric: Metric) -> None:
    """Lets a metric be computed again: a rank without samples never invalidates the last value."""
    metric._computed = None


def new_result(meta: dict[str, Any], is_tensor: bool, trainer: Trainer) -> Any:
    """Returns the result of a value that this rank has not logged."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

    metadata = _Metadata(**meta)
    metadata.sync = _Sync(_should=False, fn=trainer.strategy.reduce)
    result = _ResultMetric(metadata, is_tensor)
    if not is_tensor:
        result.value = attrgetter(metadata.metric_attribute or "")(trainer.lightning_module)
    return result.to(trainer.strategy.root_device)


_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def result_meta(result: Any) -> dict[str, Any]:
    """Returns the arguments with which a value was logged."""
    meta = result.meta
    more = {"dataloader_idx": meta.dataloader_idx, "metric_attribute": meta.metric_attribute}
    return {**{name: getattr(meta, name) for name in _META}, **more, "reduce_fx": meta.reduce_fx.__name__}
