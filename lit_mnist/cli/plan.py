"""The plan of an experiment, and the checks that it fits the data, the ranks and the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_mnist.cli.request import Request
from lit_mnist.cli.resume import report_resume, resumes_in_place
from lit_mnist.cli.validate import Validated, check_fault
from lit_mnist.data.dataset import Dataset
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import launched_from_outside, print_once
from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.plan import Plan, explain_peak
from lit_mnist.run.folder import RESULT
from lit_mnist.training.job import Splits, plan_for


def plan_experiment(validated: Validated, dataset: Dataset, splits: Splits) -> tuple[Plan, Devices]:
    """Returns the plan and the devices to use; rejects what does not fit the number of samples or the checkpoint."""
    request, experiment, saved = validated.request, validated.experiment, validated.saved
    devices, world_size = validated.devices, validated.world_size
    if experiment.trainer.devices == "auto" and request.command == "predict" and not launched_from_outside():
        devices = Devices(devices.kind, devices.numbers[: len(splits.test)])
        world_size = devices.count
    _check_split_sizes(request, splits, world_size)
    if request.trains:
        plan = plan_for(experiment, splits, world_size)
    else:
        plan = Plan.without_training(world_size, experiment.model.lr)
    if CAPABILITIES[validated.engine].processes == "devices":
        # A single process gets the whole batch; `batch_per: rank` has already counted the devices.
        plan = replace(plan, world_size=1)
    if (traced := experiment.run.trace_step) is not None and traced > plan.total_steps:
        raise InputError(f"run.trace_step is {traced}, but the steps are 1 to {plan.total_steps}.")
    check_fault(experiment.run, plan.world_size, plan.total_steps)
    if request.trains:
        _check_lightning_limits(validated.stated, plan)
        check_batch_norm(experiment, plan, world_size)
    if saved and request.trains:
        # The run may have been interrupted while it tested its weights.
        may_be_done = resumes_in_place(request) and not (Path(str(request.run_dir)) / RESULT).exists()
        saved.check_resume(experiment, dataset, plan, may_be_done=may_be_done)
        report_resume(saved)
    elif saved:
        saved.check_evaluation(experiment, dataset, validates=request.command == "validate")
    if request.trains and (reason := explain_peak(experiment.model, world_size, plan.total_steps)):
        print_once(f"note: {reason}")
    if plan.dropped:
        noun, do, be = ("samples", "do", "are") if plan.dropped > 1 else ("sample", "does", "is")
        print_once(
            f"note: {plan.dropped} {noun} of each epoch {do} not fill a batch of {plan.batch_size} and {be} dropped"
        )
    return plan, devices


def _check_split_sizes(request: Request, splits: Splits, world_size: int) -> None:
    """Rejects an empty validation split, and a split with fewer samples than ranks."""
    if request.command == "validate" and not len(splits.validation):
        raise InputError("data.val_size is 0: there is nothing to validate on.")
    sizes = {"validation": len(splits.validation) if request.trains or request.command == "validate" else 0}
    sizes["test"] = len(splits.test) if request.command in {"train", "test", "predict"} else 0
    for name, size in sizes.items():
        if 0 < size < world_size:
            what = f"There are {size} images" if request.images else f"The {name} split has {size} samples"
            raise InputError(f"{what}, fewer than the {world_size} ranks: use fewer ranks.")


def _check_lightning_limits(stated: Mapping[str, Any], plan: Plan) -> None:
    """Rejects limits of Lightning's Trainer that the training does not reach."""
    for name, most, flag in (("steps", plan.total_steps, "--max-steps"), ("epochs", plan.epochs, "--epochs")):
        if (least := stated.get(f"min_{name}") or 0) > most:
            raise InputError(f"trainer.min_{name} is {least}, but the training has {most} {name}: raise {flag}.")
    # `max_steps` may end the last epoch early.
    interval, batches = stated.get("val_check_interval"), plan.batches_in_epoch(plan.epochs - 1)
    if isinstance(interval, int | float) and interval > batches and plan.validate_every:
        last = "an epoch" if batches == plan.batches_per_epoch else "the last epoch"
        raise InputError(f"trainer.val_check_interval is {interval}, but {last} has {batches} batches: lower it.")


def check_batch_norm(experiment: Experiment, plan: Plan, devices: int) -> None:
    """Rejects one segmentation image per rank without synchronized batch norm, whose statistics need two values.

    Args:
        experiment: The experiment.
        plan: Its plan.
        devices: Number of devices that share a micro-batch.

    Raises:
        InputError: A rank would have a single image.
    """
    synchronized = plan.world_size > 1 and experiment.trainer.sync_batchnorm is not False
    if experiment.data.task.pixelwise and plan.batch_size // devices == 1 and not synchronized:
        raise InputError(
            f"data.batch_size {experiment.data.batch_size} leaves one image to each rank, too few for batch norm: "
            "raise it, or with several ranks keep trainer.sync_batchnorm on."
        )
