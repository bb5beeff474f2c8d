"""Lightning's Trainer with the project's strategy and plugins.

On CPUs, Lightning's Trainer replaces 16-mixed by bf16-mixed and rejects synchronized batch norm. It has no `auto`
precision. The plugins here add all three.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lit_mnist import experiment as settings
from lit_mnist.distributed.devices import choose_devices
from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.models.sync_batch_norm import sync_batch_norm, unsync_batch_norm
from lit_mnist.plugins._private import inspect_signature_once
from lit_mnist.training.ddp_arguments import DDP_OPTIONS, device_options
from lit_mnist.training.precision import UsedPrecision, needs_scaler, resolve_precision


class PortableLayerSync(LayerSync):
    """Synchronized batch norm for the backends that torch's own rejects.

    Args:
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._layers: list[nn.Module] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces every batch norm layer by one over all ranks."""
        synchronized = sync_batch_norm(model, "cpu", self.timeout)
        # Lightning also reverts after an error. The layers are kept, because their connections to the other ranks must
        # stay open until this rank has written its failure report.
        self._layers = list(synchronized.modules())
        return synchronized

    def revert(self, model: nn.Module) -> nn.Module:
        """Undoes `apply`."""
        return unsync_batch_norm(model)


def precision_plugin(precision: UsedPrecision, device_type: str) -> Precision:
    """Returns Lightning's plugin for a precision. 16-mixed is float16 with a GradScaler, also on CPUs."""
    if precision == "64-true":
        return DoublePrecision()
    if precision == "32-true":
        return Precision()
    assert precision == "bf16-mixed" or needs_scaler(precision)
    return MixedPrecision(precision, device=device_type)


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


class LitTrainer(Trainer):
    """Lightning's Trainer with exact precision, portable synchronized batch norm, and safe communication.

    Args:
        precision: `32-true`, `64-true`, `16-mixed`, `bf16-mixed` or `auto`, which selects 16-mixed on GPUs. On CPUs it
            selects bf16-mixed if the processor has the instructions, otherwise 32-true.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks. Defaults to True for several ranks.
        strategy: `auto` or `ddp`; both use distributed data parallel for several ranks.
        accelerator: `cpu`, `gpu`, or `auto`, which selects GPUs if there are any.
        devices: Number of ranks on this machine, a list of GPU indices, or `auto`, which selects all GPUs or one CPU.
        num_nodes: Number of machines.
        timeout: Seconds that a rank waits for the others.
        profiler: One of Lightning's profilers, or its name. Disabled by default.
        **kwargs: Further arguments of Lightning's Trainer. It trains for one epoch unless `max_epochs`, `max_steps` or
            `max_time` is given.
    """

    def __init__(
        self,
        *,
        precision: settings.Precision = "auto",
        sync_batchnorm: bool | None = None,
        strategy: Literal["auto", "ddp"] = "auto",
        accelerator: Literal["auto", "cpu", "gpu"] = "auto",
        devices: int | list[int] | Literal["auto"] = "auto",
        num_nodes: int = 1,
        timeout: float = 120.0,
        profiler: Profiler | str | None = None,
        **kwargs: Any,
    ) -> None:
        found = choose_devices(settings.TrainerSettings(accelerator=accelerator, devices=devices))
        several = found.count * num_nodes > 1
        synced = several and sync_batchnorm is not False
        plugins: list[Any] = [precision_plugin(resolve_precision(precision, found.kind), found.kind)]
        if synced:
            plugins.append(TorchSyncBatchNorm() if found.kind == "cuda" else PortableLayerSync(timeout))
        if several and launched_from_outside():
            plugins.append(TorchElasticEnvironment())
        elif not several:
            # By default, Lightning interprets the variables of a Slurm job as ranks.
            plugins.append(LightningEnvironment())
        if kwargs.get("max_time") is None and kwargs.get("max_steps", -1) == -1 and kwargs.get("max_epochs") is None:
            kwargs["max_epochs"] = settings.TrainerSettings().max_epochs
        super().__init__(
            accelerator=found.kind,
            devices=list(found.numbers) if found.kind == "cuda" else found.count,
            num_nodes=num_nodes,
            strategy=_ddp(found.kind, timeout, kwargs.get("accumulate_grad_batches", 1)) if several else strategy,
            plugins=[*plugins, *(kwargs.pop("plugins", None) or [])],
            profiler=profiler or NoProfiler(),
            **kwargs,
        )
        inspect_signature_once(self)


def _ddp(kind: str, timeout: float, accumulate: int) -> DDPStrategy:
    return SafeDDPStrategy(
        process_group_backend="nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout),
        **DDP_OPTIONS,
        **device_options(kind, accumulate),
    )
