"""All uses of private parts of Lightning and torchmetrics, each with the test that detects a change in them.

1. `disable_signal_handling`: the SIGTERM handler and the broadcast in each step. Detected by
   `test_lightning_does_not_handle_signals` in tests/faults/test_signals.py.
2. `inspect_signature_once`: the arguments of `training_step`. Detected by
   `test_the_signature_of_a_training_step_is_inspected_once` in tests/test_template.py.
3. `averaged_states`: the reductions of a torchmetrics object. Detected by
   `test_a_metric_that_averages_over_ranks_is_rejected` in tests/plugins/test_exact_metric.py.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torchmetrics import Metric


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


def averaged_states(metric: Metric) -> list[str]:
    """Returns the names of the states of a metric, and of the metrics in it, that are averaged over the ranks."""
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_mean

    metrics = [part for part in metric.modules() if isinstance(part, Metric)]
    return [name for part in metrics for name, reduce in part._reductions.items() if reduce is dim_zero_mean]
