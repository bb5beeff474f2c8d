"""Lightning's Trainer with the parts of `lit_mnist.plugins` in place."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from lit_mnist import experiment as settings
from lit_mnist.distributed.devices import choose_devices
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.plugins._private import inspect_signature_once
from lit_mnist.plugins.batch_norm import PortableSyncBatchNorm
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.precision import precision_plugin
from lit_mnist.plugins.strategy import NoProfiler, ddp_strategy
from lit_mnist.training.precision import resolve_precision


class LitTrainer(Trainer):
    """Lightning's Trainer with real float16 on CPUs, portable synchronized batch norm, and verified checkpoints.

    Args:
        precision: `32-true`, `64-true`, `16-mixed`, `bf16-mixed` or `auto`, which selects 16-mixed on GPUs. On CPUs it
            selects bf16-mixed if the processor has the instructions, otherwise 32-true.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks. Defaults to True for several ranks.
        strategy: `auto` or `ddp`; both use distributed data parallel for several ranks. Or a strategy of Lightning.
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
        strategy: Literal["auto", "ddp"] | Strategy = "auto",
        accelerator: Literal["auto", "cpu", "gpu"] = "auto",
        devices: int | list[int] | Literal["auto"] = "auto",
        num_nodes: int = 1,
        timeout: float = 120.0,
        profiler: Profiler | str | None = None,
        **kwargs: Any,
    ) -> None:
        found = choose_devices(settings.TrainerSettings(accelerator=accelerator, devices=devices))
        several = found.count * num_nodes > 1
        plugins: list[Any] = [precision_plugin(resolve_precision(precision, found.kind), found.kind)]
        plugins += kwargs.pop("plugins", None) or []
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(VerifiedCheckpointIO())
        if several and sync_batchnorm is not False:
            plugins.append(PortableSyncBatchNorm(timeout))
        if several and launched_from_outside():
            plugins.append(TorchElasticEnvironment())
        elif not several:
            # By default, Lightning interprets the variables of a Slurm job as ranks.
            plugins.append(LightningEnvironment())
        if kwargs.get("max_time") is None and kwargs.get("max_steps", -1) == -1 and kwargs.get("max_epochs") is None:
            kwargs["max_epochs"] = settings.TrainerSettings().max_epochs
        accumulate = kwargs.get("accumulate_grad_batches", 1)
        super().__init__(
            accelerator=found.kind,
            devices=list(found.numbers) if found.kind == "cuda" else found.count,
            num_nodes=num_nodes,
            strategy=ddp_strategy(found.kind, timeout, accumulate)
            if several and isinstance(strategy, str)
            else strategy,
            plugins=plugins,
            profiler=profiler or NoProfiler(),
            **kwargs,
        )
        inspect_signature_once(self)


def quieten() -> None:
    """Silences Lightning's messages that appear in every run, and a warning."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A profiler prints its summary at the end of a stage.
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    # Lightning itself causes this warning.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
