"""Lightning's DDP strategy with the arguments of all engines, and without pickles."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy

from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS, device_options
from lit_mnist.distributed.gather import all_gather_json


class SafeDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy with JSON broadcasts instead of pickles, which can execute code."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the value of rank `src`: a number, string, path (as a string) or None, or a list or dict of these.

        Raises:
            TypeError: JSON cannot express the value.
        """
        return all_gather_json(obj if self.global_rank == src else None)[src]


class NoProfiler(PassThroughProfiler):
    """Disables profiling without a new context per hook, which Lightning's own `PassThroughProfiler` creates."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> nullcontext[None]:  # type: ignore[override]
        """Returns a context that does nothing."""
        return self._nothing


def ddp_strategy(device_type: str, timeout: float, accumulate: int) -> DDPStrategy:
    """Returns the strategy for several ranks, with the DDP arguments of all engines.

    Args:
        device_type: `cpu` or `cuda`.
        timeout: Seconds that a rank waits for the others.
        accumulate: Micro-batches per optimizer step.
    """
    return SafeDDPStrategy(
        process_group_backend="nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout),
        **DDP_OPTIONS,
        **device_options(device_type, accumulate),
    )
