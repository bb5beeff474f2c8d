"""Probe of functions: collectives, averages, gradient scaling and clipping, seeds, addresses."""

import datetime
import faulthandler
import functools
import inspect
import random
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor import remote
from ddp_doctor.probes.steps import StepProbe
from ddp_doctor.probes.wrap import before, wrap, wrap_everywhere
from ddp_doctor.records.recorder import Recorder, is_called_by_user, is_sharded
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import in_backward

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "monitored_barrier",
)


class CallProbe:
    """Observes calls of functions.

    Attributes:
        before_collective: Called before each collective of the program.
    """

    def __init__(self, recorder: Recorder, spec: Spec, steps: StepProbe) -> None:
        self.recorder, self.spec, self.steps = recorder, spec, steps
        self._depth = 0
        self._has_hooks = False
        self.before_collective: Callable[[], None] = lambda: None
        # Asynchronous collectives that nobody has waited for, with their events and the memory of their results.
        self._begun: list[tuple[dist.Work, dict[str, Any], set[int]]] = []

    def install(self) -> None:
        """Installs the probes."""
        for name in COLLECTIVES:
            wrap_everywhere(name, getattr(dist, name), self._on_collective)
        for name in ("wait", "is_completed", "get_future", "synchronize", "block_current_stream"):
            before(dist.Work, name, self._on_wait)
        wrap_everywhere("init_process_group", dist.init_process_group, self._on_init)
        wrap_everywhere("destroy_process_group", dist.destroy_process_group, self._on_destroy)
        wrap_everywhere("manual_seed", torch.manual_seed, functools.partial(self._on_seed, "torch"))
        for generator, module in (("NumPy", np.random), ("Python", random)):
            wrap(module, "seed", functools.partial(self._on_seed, generator))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap_everywhere(name, getattr(nn.utils, name), self._on_clip)
        # A scaler for GPUs is disabled here, but its calls come in the same order.
        before(GradScaler, "__init__", self._on_scaler)
        before(Join, "__enter__", lambda *_: self.recorder.add("join"))
        before(Join, "__exit__", lambda *_: self.recorder.add("joined"))
        before(GradScaler, "unscale_", lambda scaler, *_: self.recorder.add("unscale"))
        before(GradScaler, "step", lambda scaler, *_, **__: self.recorder.add("scaler_step"))
        before(GradScaler, "scale", lambda scaler, *_: self.recorder.add("scale", scale=scaler.get_scale()))
        wrap(DistributedDataParallel, "register_comm_hook", self._on_register)
        for averager in (PeriodicModelAverager, HierarchicalModelAverager):
            before(averager, "average_parameters", self._on_average)
        remote.watch(lambda address: self.recorder.add("remote", address=address))

    def _on_collective(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            # all_gather_object and others are made of collectives.
            return original(*args, **kwargs)
        self.before_collective()
        self._depth += 1
        self.recorder.collectives += 1
        try:
            tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor)]
            # Another thread, as that of an asynchronous checkpoint, has an order of its own. A communication hook calls
            # its second collective in whichever thread the first one ends: that of the backward pass, or another one.
            of_hook = self._has_hooks and in_backward()
            aside = threading.current_thread() is not threading.main_thread() or of_hook
            groups = [value for value in [*args, *kwargs.values()] if isinstance(value, dist.ProcessGroup)]
            event = self.recorder.add(
                "collective",
                value=None,
                op=original.__name__,
                subgroup=aside or any(group.size() < dist.get_world_size() for group in groups),
                size=tensors[0].numel() if tensors else 0,
                direct=is_called_by_user(),
            )
            result = original(*args, **kwargs)
            if tensors and tensors[0].numel() == 1 and not (tensors[0].is_complex() or kwargs.get("async_op")):
                event["value"] = float(tensors[0])
            # A library may wait in another way, as Join does.
            elif isinstance(result, dist.Work) and not aside and is_called_by_user():
                self._begun.append((result, event, {tensor.data_ptr() for tensor in tensors}))
            return result
        finally:
            self._depth -= 1

    def _on_wait(self, work: dist.Work, *_: Any, **__: Any) -> None:
        self._begun = [begun for begun in self._begun if begun[0] is not work]

    def after_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records the collectives on gradients, and those of earlier steps, that an optimizer step did not wait for."""
        if not self._begun:
            return
        gradients = {parameter.grad.data_ptr() for parameter in parameters if parameter.grad is not None}
        for begun in list(self._begun):
            _, event, results = begun
            # The results of one step may be waited for in the next.
            if results & gradients or event["step"] < self.recorder.step - 2:
                self.recorder.add("not_waited", op=event["op"], of=event["place"])
                self._begun.remove(begun)

    def _on_init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(inspect.signature(original).parameters, args, strict=False)), **kwargs}
        backend = given.pop("backend", None)
        # NCCL needs a GPU, which may be an emulated one.
        if not torch.cuda.is_available():
            backend = "gloo" if backend is None or "nccl" in str(backend) else backend
            given.pop("device_id", None)
        given["timeout"] = datetime.timedelta(seconds=max(5.0, self.spec.timeout / 2))
        original(backend, **given)
        self.recorder.rank = dist.get_rank()
        self.recorder.active = True
        # As soon as a rank fails, torchrun ends those that hang.
        self._stack = (self.recorder.folder / f"stack{self.recorder.rank}.txt").open("a")
        faulthandler.register(signal.SIGTERM, self._stack, chain=True)
        self.recorder.add("init_process_group", direct=is_called_by_user(), world=dist.get_world_size())

    def _on_destroy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.recorder.add("destroy_process_group")
        return original(*args, **kwargs)

    def _on_seed(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.recorder.add("seed", generator=name)
        return original(*args, **kwargs)

    def _on_clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value", 0.0))
        self._keep_unclipped()
        event = self.recorder.add("clip", function=original.__name__, limit=float(limit), norm=None)
        result = original(*args, **kwargs)
        if isinstance(result, torch.Tensor) and not is_sharded(result):
            event["norm"] = float(result)
        return result

    def _keep_unclipped(self) -> None:
        """Records the gradients before they are clipped."""
        if self.spec.purpose == "numbers" and self.recorder.step < self.steps.most_steps(0):
            for key, parameter in self.steps.parameters().items():
                if parameter.grad is not None:
                    self.recorder.keep(f"unclipped/{self.recorder.step}/{key}", parameter.grad)

    def _on_scaler(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        # Its sixth argument.
        self.recorder.add("scaler", enabled=bool(args[5] if len(args) > 5 else kwargs.get("enabled", True)))

    def _on_average(self, averager: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.add("average", name=type(averager).__name__)

    def _on_register(
        self, original: Callable[..., Any], ddp: Any, state: Any, hook: Callable[..., Any], **kwargs: Any
    ) -> Any:
        name = getattr(hook, "__qualname__", type(hook).__name__).replace("<locals>.", "")
        self.recorder.add("comm_hook", name=name)
        self._has_hooks = True
        # Compression would hide or feign a fault of the numbers. What the hook does is seen in the other runs.
        if self.spec.purpose == "numbers":
            state, hook = ddp.process_group, allreduce_hook
        return original(ddp, state, hook)
