"""Lightning's Trainer, configured with the plugins of `lit_mnist.plugins`."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage

from lit_mnist.distributed.devices import choose_devices
from lit_mnist.distributed.precision import resolve_precision
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.errors import InputError
from lit_mnist.plugins.batch_norm import PortableSyncBatchNorm
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.evaluation.loaders import accept_loaders
from lit_mnist.plugins.evaluation.logged import ExactEvaluation
from lit_mnist.plugins.lightning_internals import inspect_signature_once
from lit_mnist.plugins.lightning_messages import OF_LIT_TRAINER, hide_messages
from lit_mnist.plugins.precision import precision_plugin
from lit_mnist.plugins.step.lightning_internals import quicken
from lit_mnist.plugins.strategy import NoProfiler, ddp_strategy
from lit_mnist.run import trainer_settings as settings


class LitTrainer(Trainer):
    """Lightning's Trainer with real float16 on CPUs, portable synchronized batch norm, and verified checkpoints.

    It trains any module with any loaders, as a stock Trainer does:

        trainer = LitTrainer(accelerator="cpu", devices=1, max_steps=2)
        trainer.fit(module, train_loader)

    Args:
        precision: `32-true`, `64-true`, `16-mixed`, `bf16-mixed` or `auto`, which selects 16-mixed on GPUs. On CPUs it
            selects bf16-mixed if the processor computes it faster than float32, otherwise 32-true.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks. Defaults to True for several ranks.
        strategy: `auto` or `ddp`; both use distributed data parallel for several ranks. Alternatively, any strategy of
            Lightning, or its name.
        accelerator: `cpu`, `gpu`, or `auto`, which selects GPUs if there are any.
        devices: Number of ranks on this machine, a list of GPU indices, or `auto`, which selects all GPUs or one CPU.
        num_nodes: Number of machines.
        timeout: Seconds that a rank waits for the others; another strategy has its own timeout.
        profiler: One of Lightning's profilers, or its name. Disabled by default.
        exact_evaluation: Whether validation and test are exact to the sample on several ranks: plain map-style loaders
            are split without padding, and logged values are reduced once at the end. A rank may have a batch less than
            the others, or none. Set it to False if a validation or test step calls collectives.
        plugins: Plugins of Lightning. They replace this Trainer's plugins of the same kind.
        **kwargs: Further arguments of Lightning's Trainer. It trains for one epoch unless `max_epochs`, `max_steps` or
            `max_time` is given.

    Raises:
        InputError: The device does not support the precision, or the precision is given twice.
    """

    def __init__(
        self,
        *,
        precision: settings.Precision = "auto",
        sync_batchnorm: bool | None = None,
        strategy: str | Strategy = "auto",
        accelerator: Literal["auto", "cpu", "gpu"] = "auto",
        devices: int | list[int] | Literal["auto"] = "auto",
        num_nodes: int = 1,
        timeout: float = 120.0,
        profiler: Profiler | str | None = None,
        exact_evaluation: bool = True,
        plugins: Any = None,
        **kwargs: Any,
    ) -> None:
        chosen = choose_devices(settings.TrainerSettings(accelerator=accelerator, devices=devices))
        is_distributed = chosen.count * num_nodes > 1
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins] if plugins else []

        def is_given(kind: type) -> bool:
            return any(isinstance(plugin, kind) for plugin in plugins)

        # What goes wrong without each part stands before it.
        if not is_given(Precision):
            # On CPUs, Lightning's 16-mixed computes in bfloat16.
            plugins.append(precision_plugin(resolve_precision(precision, chosen.kind), chosen.kind))
        elif precision != "auto":
            raise InputError(f"The precision is given twice: as {precision} and as a plugin.")
        if not is_given(CheckpointIO):
            # A checkpoint is lost in a crash of the machine, silently damaged, or delays the training.
            plugins.append(VerifiedCheckpointIO())
        if is_distributed and sync_batchnorm is not False and not is_given(LayerSync):
            # Each rank normalizes with its own samples, and `Trainer(sync_batchnorm=True)` fails on CPUs.
            plugins.append(PortableSyncBatchNorm(timeout))
        if not is_given(ClusterEnvironment):
            if is_distributed and launched_from_outside():
                # Lightning starts ranks of its own beside those of torchrun.
                plugins.append(TorchElasticEnvironment())
            elif not is_distributed:
                # Lightning interprets the variables of a Slurm job as ranks.
                plugins.append(LightningEnvironment())
        if kwargs.get("max_time") is None and kwargs.get("max_steps", -1) == -1 and kwargs.get("max_epochs") is None:
            kwargs["max_epochs"] = settings.TrainerSettings().max_epochs
        if is_distributed and strategy in ("auto", "ddp"):
            # A hang ends after 30 minutes instead of `timeout`, and what ranks send each other can execute code.
            strategy = ddp_strategy(chosen.kind, timeout, kwargs.get("accumulate_grad_batches", 1))
        hide_messages(OF_LIT_TRAINER)
        super().__init__(
            accelerator=chosen.kind,
            devices=list(chosen.numbers) if chosen.kind == "cuda" else chosen.count,
            num_nodes=num_nodes,
            strategy=strategy,
            plugins=plugins,
            # Lightning creates a context per hook even if nothing is profiled.
            profiler=profiler or NoProfiler(),
            **kwargs,
        )
        inspect_signature_once(self)
        quicken(self)
        accept_loaders(self)
        self._exact_evaluation = None
        if self.world_size > 1 and exact_evaluation:
            # The last batch is padded with samples that are counted twice, and batch means are averaged over ranks.
            splits = kwargs.get("use_distributed_sampler", True)
            self._exact_evaluation = ExactEvaluation(self, splits=splits)

    @property
    def inexact_evaluation(self) -> list[str]:
        """Why the last validation or test depends on the number of ranks, each with the fix; empty if it is exact."""
        if self._exact_evaluation is not None:
            return self._exact_evaluation.reasons
        return ["exact_evaluation is False"] if self.world_size > 1 else []

    @property
    def training(self) -> bool:
        """Whether the Trainer trains, and does not validate, test or predict."""
        # Lightning compares two texts in lower case for it, fifteen times per step.
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        Trainer.training.fset(self, value)  # type: ignore[attr-defined]
