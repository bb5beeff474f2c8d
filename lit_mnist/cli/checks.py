"""What is refused before a rank starts, though each setting by itself is right: it does not fit the rest."""

from __future__ import annotations

import os

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder

from lit_mnist.cli.configure import Configuration
from lit_mnist.cli.flags import CommandLine
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.errors import InputError
from lit_mnist.experiment import SCENE_NAMES, DataSettings, Experiment, RunSettings
from lit_mnist.experiment.plan import Plan
from lit_mnist.training.job import Splits

_AVERAGES = (
    "it replaces the weights by averages, but best.ckpt, the test and weights_sha256 are of the weights that are "
    "trained, and a resumed run would not have the averages: leave it out"
)
# Callbacks that would break a promise: how, and what to do instead.
_REJECTED: tuple[tuple[type[Callback], str], ...] = (
    (Checkpoint, "the project keeps its checkpoints itself: see --save-every and --keep"),
    (ProgressBar, "the project shows its progress itself: leave it out"),
    (
        GradientAccumulationScheduler,
        "it changes how many micro-batches form an optimizer step, but the samples of a step are a function of the "
        "seed and the step alone: use --trainer.accumulate_grad_batches",
    ),
    (WeightAveraging, _AVERAGES),
    (StochasticWeightAveraging, _AVERAGES),
    (
        LearningRateFinder,
        "it trains before the run, and replaces the learning rate that config.yaml states: choose it by --lr",
    ),
    (
        BatchSizeFinder,
        "it trains before the run, and replaces the batch size, but the samples of a step are a function of the seed "
        "and the step alone: choose it by --batch-size",
    ),
    (
        ModelPruning,
        "it replaces the network's parameters, so that no run could resume from its checkpoints: leave it out",
    ),
    (
        BaseFinetuning,
        "it adds parameters to the optimizer during the run, so that no run could resume from its checkpoints: start "
        "from other weights by --model.weights",
    ),
    (
        LearningRateMonitor,
        "it needs a logger of Lightning's, which a run has none of: metrics.csv and the TensorBoard files hold the "
        "learning rate",
    ),
    (
        DeviceStatsMonitor,
        "it needs a logger of Lightning's, which a run has none of: result.json holds the peak of the memory",
    ),
)


def check_launch(run: RunSettings, world_size: int) -> None:
    """Refuses options of the launch that do not fit how the ranks are started, or how many they are.

    Raises:
        InputError: One does not fit.
    """
    outside = launched_from_outside()
    if outside and run.launcher != "agent":
        raise InputError("run.launcher is for ranks that this command starts: here an outside launcher has.")
    if run.launcher != "agent" and world_size == 1:
        raise InputError("run.launcher is for several ranks: one rank runs in this process.")
    if run.servers > world_size:
        raise InputError(f"run.servers is {run.servers}, but each has its rank, and there are {world_size}.")
    if outside and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not run.dir:
        raise InputError("A restart by torchrun goes on in the folder that --run-dir names: give --run-dir.")
    if run.max_restarts and (outside or run.launcher != "agent"):
        raise InputError("run.max_restarts is for ranks that torch's elastic agent starts here: it has no effect.")


def check_batch_norm(experiment: Experiment, plan: Plan, devices: int) -> None:
    """Refuses a scene alone on a rank whose batch norm sees no other's: a branch of the network sees it as one pixel.

    Args:
        experiment: The experiment.
        plan: Its plan.
        devices: Devices that a micro-batch is split over.

    Raises:
        InputError: There would be such a rank.
    """
    synchronised = plan.world_size > 1 and experiment.trainer.sync_batchnorm is not False
    if experiment.data.name in SCENE_NAMES and plan.batch_size // devices == 1 and not synchronised:
        raise InputError(
            f"data.batch_size {experiment.data.batch_size} leaves one scene to each rank, of which batch norm cannot "
            "take a mean: raise it, or with several ranks leave trainer.sync_batchnorm on."
        )


def check_deterministic(experiment: Experiment, kind: str) -> None:
    """Refuses to be deterministic where torch cannot, before a rank fails in its first step.

    Args:
        experiment: The experiment.
        kind: Kind of the devices: `cpu` or `cuda`.

    Raises:
        InputError: Scenes are to be trained on GPUs, deterministically.
    """
    if experiment.trainer.deterministic and kind == "cuda" and experiment.data.name in SCENE_NAMES:
        raise InputError("trainer.deterministic: torch has no deterministic loss of pixels on GPUs: leave it out.")


def check_steps(run: RunSettings, plan: Plan) -> None:
    """Refuses a fault that would never come, and a step to keep that would never be made.

    Raises:
        InputError: It names a rank or a step that there is not.
    """
    if run.trace_step is not None and run.trace_step > plan.total_steps:
        raise InputError(f"run.trace_step is {run.trace_step}, but the steps are 1 to {plan.total_steps}.")
    if run.fault and (run.fault[1] >= plan.world_size or run.fault[2] > plan.total_steps):
        ranks, steps = f"0 to {plan.world_size - 1}", f"1 to {plan.total_steps}"
        raise InputError(f"run.inject is {run.inject}, but the ranks are {ranks}, and the steps {steps}.")


def check_accelerate() -> None:
    """Refuses a start by `accelerate launch` that has, on CPUs, made one process where several were asked for.

    Raises:
        InputError: It has.
    """
    asked_for_several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if asked_for_several and "RANK" not in os.environ:
        raise InputError(
            "accelerate launch was asked for several processes and has started one, as it does on CPUs: start them by "
            "torchrun, or by --devices without a launcher."
        )


def check_extras(configuration: Configuration) -> None:
    """Makes the further Trainer options once, so that a wrong one is refused before anything is written.

    Raises:
        InputError: One cannot be made, or would break a promise.
    """
    try:
        made = configuration.extras.make().get("callbacks", [])
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"trainer.{configuration.extras.names[0]} cannot be made: {reason}") from error
    for callback in made if isinstance(made, list) else [made]:
        for kind, reason in _REJECTED:
            if isinstance(callback, kind):
                raise InputError(f"trainer.callbacks names {type(callback).__name__}: {reason}.")
        if isinstance(callback, EarlyStopping):
            _check_watched(callback.monitor, configuration.experiment.data)


def _check_watched(figure: str, data: DataSettings) -> None:
    """Refuses a figure that the validation does not give, which Lightning would find out after an epoch."""
    known = ["val_loss", "val_accuracy", *(["val_mean_iou"] if data.name in SCENE_NAMES else [])]
    if data.val_size == 0:
        raise InputError(f"trainer.callbacks watches {figure}, but data.val_size is 0: there is no validation.")
    if figure not in known:
        raise InputError(f"trainer.callbacks watches {figure}, but the figures are {', '.join(known)}.")


def check_evaluation(line: CommandLine, splits: Splits, world_size: int) -> None:
    """Refuses a split with fewer samples than ranks, of which some would have nothing to evaluate.

    Raises:
        InputError: There are too few.
    """
    if line.verb == "validate" and not len(splits.validation):
        raise InputError("data.val_size is 0: there is nothing to validate on.")
    sizes = {"validation": len(splits.validation) if line.trains or line.verb == "validate" else 0}
    sizes["test"] = len(splits.test) if line.verb in {"train", "test", "predict"} else 0
    for name, size in sizes.items():
        if 0 < size < world_size:
            what = f"There are {size} pictures" if line.images else f"The {name} split has {size} samples"
            raise InputError(f"{what}, fewer than the {world_size} ranks: use fewer ranks.")
