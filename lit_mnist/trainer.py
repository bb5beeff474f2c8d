"""Lightning's Trainer with the plugins of `lit_mnist.plugins`."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO, LayerSync, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_mnist.plugins import (
    ChannelsLast,
    ExactAccumulation,
    ExactCheckpoint,
    ExactDDPStrategy,
    ExactEvaluation,
    FailureReport,
    PortableSyncBatchNorm,
    SkippedStepSchedule,
    StopOnNonFinite,
    StopTogether,
    VerifiedCheckpointIO,
)
from lit_mnist.plugins.lightning_internals import skip_sigterm_broadcast
from lit_mnist.plugins.precision import precision_plugin, resolve_precision

# The others are Lightning's own.
_PLUGIN_PRECISIONS = ("auto", "32-true", "64-true", "16-mixed", "bf16-mixed")


class LitTrainer(Trainer):
    """A stock Trainer with a list of plugins and callbacks, which you can copy to yours one by one.

    It trains any module with any loaders:

        trainer = LitTrainer(devices=2, max_epochs=3, default_root_dir="runs/mine")
        trainer.train(module, datamodule)

    Args:
        accelerator: As for a Trainer.
        devices: As for a Trainer; `auto` selects all GPUs or one process on the CPU.
        num_nodes: Number of machines.
        strategy: As for a Trainer; `auto` and `ddp` select DDP with exact evaluation for several ranks.
        precision: As for a Trainer, or `auto`, which selects 16-mixed on GPUs, bf16-mixed on CPUs with fast bfloat16
            instructions, and 32-true on others. 16-mixed is float16 with a GradScaler on CPUs as well.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks, on CPUs as well.
        default_root_dir: The run folder; by default `runs/<time>`. Each of several trainers in a script needs its own.
        max_epochs: Epochs to train; 1 if neither this nor `max_steps` nor `max_time` is given.
        max_steps: Most optimizer steps; -1 for no limit.
        max_time: Most time, as for a Trainer.
        use_distributed_sampler: Whether loaders that have torch's own samplers are split over the ranks.
        timeout: Seconds that a rank waits for the others.
        logger: Loggers; by default `metrics.csv` and TensorBoard files in the run folder.
        callbacks: Further callbacks. An ExactCheckpoint, or a ModelCheckpoint with a monitor, replaces that of the run
            folder.
        plugins: Plugins of Lightning, which replace those of the same kind.
        **kwargs: Further arguments of a Trainer.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: str | int | None = "auto",
        sync_batchnorm: bool = True,
        default_root_dir: str | Path | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        max_time: str | timedelta | dict[str, int] | None = None,
        use_distributed_sampler: bool = True,
        timeout: float = 120.0,
        logger: Any = None,
        callbacks: list[Callback] | Callback | None = None,
        plugins: Any = None,
        **kwargs: Any,
    ) -> None:
        device_type, count = choose_devices(accelerator, devices)
        ranks = count * num_nodes
        # Of the ranks that a Trainer starts itself, each runs the script again: they use the folder of the first.
        inherited = os.environ.get("LIT_MNIST_RUN_DIR") if "LOCAL_RANK" in os.environ else None
        root = Path(default_root_dir or inherited or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
        os.environ["LIT_MNIST_RUN_DIR"] = str(root)
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins] if plugins else []
        callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
        reason = ""

        # The comment at each part says what goes wrong without it.
        shards = str(strategy).startswith(("fsdp", "deepspeed")) or isinstance(strategy, FSDPStrategy)
        if precision in _PLUGIN_PRECISIONS and not shards and not _has(plugins, Precision):
            # On CPUs, Lightning's 16-mixed computes in bfloat16, with a warning.
            used, reason = resolve_precision(cast(Any, precision), device_type)
            plugins.append(precision_plugin(used, device_type))
            precision = None
        if not _has(plugins, CheckpointIO):
            # A crash while a file is written loses the old one as well, and a flipped bit is loaded without a word.
            plugins.append(VerifiedCheckpointIO())
        if ranks > 1 and sync_batchnorm and not _has(plugins, LayerSync):
            # Each rank normalizes with its own samples; Trainer(sync_batchnorm=True) fails on CPUs.
            plugins.append(PortableSyncBatchNorm())
        if ranks > 1 and strategy in ("auto", "ddp"):
            # The last batch of an evaluation is padded with samples that are counted twice.
            strategy = ExactDDPStrategy(split=use_distributed_sampler, timeout=timedelta(seconds=timeout))
        if isinstance(strategy, ExactDDPStrategy):
            use_distributed_sampler = False  # The strategy splits the loaders.
        if kwargs.get("enable_checkpointing", True) is not False and not kwargs.get("fast_dev_run"):
            if not any(isinstance(each, ModelCheckpoint) and each.monitor for each in callbacks):
                # The test is that of the last weights, not of the best.
                callbacks.insert(0, BestCheckpoint(root / "checkpoints"))
            if not _has(callbacks, ExactCheckpoint):
                # A resumed epoch begins again with other samples and other random numbers.
                callbacks.append(ExactCheckpoint(root / "checkpoints"))
        if kwargs.get("enable_progress_bar", True) is not False and not _has(callbacks, ProgressBar):
            # A bar that is drawn in each step takes a twentieth of MNIST's training.
            callbacks.append(RichProgressBar(refresh_rate=20))
        callbacks += [
            ExactAccumulation(),  # The gradient of a shorter last window is too small.
            SkippedStepSchedule(),  # The schedule advances although the step was skipped in float16.
            ChannelsLast(),  # Convolutions on CPUs take longer.
            ExactEvaluation(),  # What depends on the number of ranks is not said.
            StopTogether(),  # A signal loses the steps since the last checkpoint, or hangs.
            FailureReport(),  # A failed rank is not named.
        ]
        if ranks == 1 or isinstance(strategy, DDPStrategy) or str(strategy).startswith("ddp"):
            callbacks.append(StopOnNonFinite())  # A NaN trains on until the end.
        if logger is None or logger is True:
            logger = [CSVLogger(root, name="", version=""), TensorBoardLogger(root, name="", version="")]
        if max_epochs is None and max_steps == -1 and max_time is None:
            max_epochs = 1
        super().__init__(
            accelerator="cpu" if accelerator == "auto" and device_type == "cpu" else accelerator,
            devices=count if devices == "auto" else devices,
            num_nodes=num_nodes,
            strategy=strategy,
            precision=cast(Any, None if precision == "auto" else precision),
            default_root_dir=root,
            max_epochs=max_epochs,
            max_steps=max_steps,
            max_time=max_time,
            use_distributed_sampler=use_distributed_sampler,
            logger=logger,
            callbacks=callbacks,
            plugins=plugins,
            **kwargs,
        )
        if device_type == "cpu" and accelerator == "auto" and CUDAAccelerator.is_available():
            reason = f"There is no GPU for each of {count} ranks, which train on the CPU. {reason}"
        if reason:
            rank_zero_info(reason)
        if self.world_size > 1:
            skip_sigterm_broadcast(self)

    def train(
        self, model: LightningModule, datamodule: Any = None, ckpt_path: str | Path | None = None
    ) -> list[Any] | None:
        """Fits, then tests with the best weights.

        Args:
            model: The module.
            datamodule: The data module, or None if the module has the loaders.
            ckpt_path: A checkpoint to resume from.

        Returns:
            The metrics of the test, or None if there is no test.
        """
        self.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
        owners = [owner for owner in (model, datamodule) if owner is not None]
        if not (is_overridden("test_step", model) and any(is_overridden("test_dataloader", one) for one in owners)):
            return None
        best = getattr(self.checkpoint_callback, "best_model_path", "")
        return list(self.test(model, datamodule=datamodule, ckpt_path=best or None))


class BestCheckpoint(ModelCheckpoint):
    """Keeps `best.ckpt`, the weights with the lowest `val_loss`, of a module that logs it."""

    def __init__(self, dirpath: Path) -> None:
        super().__init__(
            dirpath, filename="best", monitor="val_loss", enable_version_counter=False, save_on_train_epoch_end=False
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the weights if they are the best so far."""
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)


def choose_devices(accelerator: str = "auto", devices: list[int] | str | int = "auto") -> tuple[str, int]:
    """Returns the device type, `cuda` or `cpu`, and the number of ranks on this machine.

    A Trainer chooses them so, but fails with `auto` if there are GPUs, but not one for each rank: these train on the
    CPU. If torchrun or srun has started the ranks, `auto` is their number.
    """
    if devices == "auto":
        devices = os.environ.get("LOCAL_WORLD_SIZE", "auto")
    gpus = CUDAAccelerator.auto_device_count() if CUDAAccelerator.is_available() else 0
    enough = gpus >= int(str(devices)) if str(devices).isdigit() else bool(gpus)
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and enough):
        if devices == "auto":
            return "cuda", gpus
        return "cuda", len(CUDAAccelerator.parse_devices(devices) or [])
    return "cpu", 1 if devices == "auto" else CPUAccelerator.parse_devices(devices)  # type: ignore[arg-type]


def _has(values: list[Any], kind: type) -> bool:
    return any(isinstance(value, kind) for value in values)
