"""Probe of other ways to communicate than DDP's own all-reduce: communication hooks, and averaged weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

# Larger buckets are not recorded.
_LARGE = 5_000_000


class CommunicationProbe:
    """Records what the communication hooks get and return, and which weights are averaged."""

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self._hooks = 0

    def install(self) -> None:
        """Installs the probes."""
        wrap(DistributedDataParallel, "register_comm_hook", self._on_register)
        for averager in (PeriodicModelAverager, HierarchicalModelAverager):
            before(averager, "average_parameters", self._on_average)

    def _on_average(self, averager: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.add("average", name=type(averager).__name__)

    def _on_register(
        self, original: Callable[..., Any], ddp: Any, state: Any, hook: Callable[..., Any], **kwargs: Any
    ) -> Any:
        number, self._hooks = self._hooks, self._hooks + 1
        name = getattr(hook, "__qualname__", type(hook).__name__).replace("<locals>.", "")
        self.recorder.add("comm_hook", name=name)
        self.recorder.has_hooks = True
        # One process communicates with nobody, so compression would only change its numbers.
        alone = self.spec.purpose == "numbers" and self.spec.world_size == 1
        if alone or self.spec.interventions.get("plain_average"):
            return original(ddp, ddp.process_group, allreduce_hook)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Any:
            step, given = self.recorder.step, bucket.buffer()
            if step >= 2 * self.spec.steps or given.numel() > _LARGE:
                return hook(state, bucket)
            key = f"{step}/{number}.{bucket.index()}"
            self.recorder.keep(f"hook_in/{key}", given)

            def keep(done: Any) -> Any:
                result = done.value()
                if isinstance(result, torch.Tensor):
                    self.recorder.keep(f"hook_out/{key}", result)
                return result

            return hook(state, bucket).then(keep)

        return original(ddp, state, observed)
