"""What is refused before a rank starts, though each setting by itself is right: it does not fit the rest."""

from __future__ import annotations

import os

from lit_mnist.cli.parser import Request
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, RunSettings
from lit_mnist.experiment.plan import Plan
from lit_mnist.training.job import Splits


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
    if experiment.data.task.pixelwise and plan.batch_size // devices == 1 and not synchronised:
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
        InputError: Segmentation on GPUs is to be deterministic.
    """
    if experiment.trainer.deterministic and kind == "cuda" and experiment.data.task.pixelwise:
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


def check_evaluation(request: Request, splits: Splits, world_size: int) -> None:
    """Refuses a split with fewer samples than ranks, of which some would have nothing to evaluate.

    Raises:
        InputError: There are too few.
    """
    if request.command == "validate" and not len(splits.validation):
        raise InputError("data.val_size is 0: there is nothing to validate on.")
    sizes = {"validation": len(splits.validation) if request.trains or request.command == "validate" else 0}
    sizes["test"] = len(splits.test) if request.command in {"train", "test", "predict"} else 0
    for name, size in sizes.items():
        if 0 < size < world_size:
            what = f"There are {size} images" if request.images else f"The {name} split has {size} samples"
            raise InputError(f"{what}, fewer than the {world_size} ranks: use fewer ranks.")
