"""Step 4, plan: batches and steps of the loaded samples on the ranks, and whether a checkpoint fits them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lit_mnist.cli.load import Loaded
from lit_mnist.cli.parser import Request
from lit_mnist.cli.validate import Validated, continues_in_place
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import launched_from_outside, print_once, threads_per_rank, warn_once
from lit_mnist.distributed.terminal import display_path
from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, RunSettings
from lit_mnist.experiment.plan import Plan
from lit_mnist.run.folder import RESULT
from lit_mnist.training.job import Splits, plan_for


@dataclass(frozen=True)
class Planned:
    """How the samples are used.

    Attributes:
        plan: Batches and steps.
        devices: Devices of this machine that are used.
        threads: Threads of each rank.
    """

    plan: Plan
    devices: Devices
    threads: int


def plan(validated: Validated, loaded: Loaded) -> Planned:
    """Plans the batches and steps, and makes every check that needs them.

    Raises:
        InputError: The samples do not suffice, or the checkpoint was made of other data or batches.
    """
    request, experiment, saved = validated.request, validated.experiment, validated.saved
    devices, world_size = validated.devices, validated.world_size
    if experiment.trainer.devices == "auto" and request.command == "predict" and not launched_from_outside():
        devices = Devices(devices.kind, devices.numbers[: len(loaded.splits.test)])
        world_size = devices.count
    _check_evaluation(request, loaded.splits, world_size)
    made = (
        plan_for(experiment, loaded.splits, world_size)
        if request.trains
        else Plan.without_training(world_size, experiment.model.lr)
    )
    one_process = CAPABILITIES[validated.engine].processes == "devices"
    if one_process:
        # One process gets the whole batch; the devices count where `batch_per` multiplies by the ranks.
        made = replace(made, world_size=1)
    _check_steps(experiment.run, made)
    if request.trains:
        check_batch_norm(experiment, made, world_size)
    if saved and request.trains:
        # The run may have been interrupted while it tested its weights.
        may_be_done = continues_in_place(request) and not (Path(str(request.run_dir)) / RESULT).exists()
        saved.check_resume(experiment, loaded.dataset, made, may_be_done=may_be_done)
        print_once(f"note: resuming from {display_path(saved.path.absolute())} after step {saved.step}")
    elif saved:
        saved.check_evaluation(experiment, loaded.dataset, validates=request.command == "validate")
    if made.dropped:
        noun, do, be = ("samples", "do", "are") if made.dropped > 1 else ("sample", "does", "is")
        print_once(
            f"note: {made.dropped} {noun} of each epoch {do} not fill a batch of {made.batch_size} and {be} dropped"
        )
    return Planned(made, devices, _threads(validated, 1 if one_process else devices.count))


def check_batch_norm(experiment: Experiment, plan: Plan, devices: int) -> None:
    """Rejects a single segmentation image per rank without synchronized batch norm, which sees it as one pixel.

    Args:
        experiment: The experiment.
        plan: Its plan.
        devices: Devices that a micro-batch is split over.

    Raises:
        InputError: A rank would have a single image.
    """
    synchronized = plan.world_size > 1 and experiment.trainer.sync_batchnorm is not False
    if experiment.data.task.pixelwise and plan.batch_size // devices == 1 and not synchronized:
        raise InputError(
            f"data.batch_size {experiment.data.batch_size} leaves one image to each rank, of which batch norm cannot "
            "take a mean: raise it, or with several ranks leave trainer.sync_batchnorm on."
        )


def _check_steps(run: RunSettings, plan: Plan) -> None:
    """Rejects a fault or a traced step that the run does not reach."""
    if run.trace_step is not None and run.trace_step > plan.total_steps:
        raise InputError(f"run.trace_step is {run.trace_step}, but the steps are 1 to {plan.total_steps}.")
    if run.fault and (run.fault[1] >= plan.world_size or run.fault[2] > plan.total_steps):
        ranks, steps = f"0 to {plan.world_size - 1}", f"1 to {plan.total_steps}"
        raise InputError(f"run.inject is {run.inject}, but the ranks are {ranks}, and the steps {steps}.")


def _check_evaluation(request: Request, splits: Splits, world_size: int) -> None:
    """Rejects a split with fewer samples than ranks, some of which would have nothing to evaluate."""
    if request.command == "validate" and not len(splits.validation):
        raise InputError("data.val_size is 0: there is nothing to validate on.")
    sizes = {"validation": len(splits.validation) if request.trains or request.command == "validate" else 0}
    sizes["test"] = len(splits.test) if request.command in {"train", "test", "predict"} else 0
    for name, size in sizes.items():
        if 0 < size < world_size:
            what = f"There are {size} images" if request.images else f"The {name} split has {size} samples"
            raise InputError(f"{what}, fewer than the {world_size} ranks: use fewer ranks.")


def _threads(validated: Validated, local_world_size: int) -> int:
    """Returns the number of threads of each rank, which a resumed training keeps."""
    setting, saved = validated.experiment.run.threads, validated.saved
    if saved and validated.request.trains:
        return saved.threads(setting, local_world_size, warn_once)
    return threads_per_rank(setting, local_world_size)
