"""Checks that an experiment fits the data and the devices, as far as its sections do not know each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_mnist.cli.request import Request
from lit_mnist.cli.validate import check_fault
from lit_mnist.errors import InputError
from lit_mnist.experiment.plan import Plan
from lit_mnist.run.settings import RunSettings
from lit_mnist.training.job import Splits


def check_steps(run: RunSettings, plan: Plan) -> None:
    """Rejects an injected fault or a traced step that the run does not reach."""
    if run.trace_step is not None and run.trace_step > plan.total_steps:
        raise InputError(f"run.trace_step is {run.trace_step}, but the steps are 1 to {plan.total_steps}.")
    check_fault(run, plan.world_size, plan.total_steps)


def check_split_sizes(request: Request, splits: Splits, world_size: int) -> None:
    """Rejects an empty validation split, and a split with fewer samples than ranks."""
    if request.command == "validate" and not len(splits.validation):
        raise InputError("data.val_size is 0: there is nothing to validate on.")
    sizes = {"validation": len(splits.validation) if request.trains or request.command == "validate" else 0}
    sizes["test"] = len(splits.test) if request.command in {"train", "test", "predict"} else 0
    for name, size in sizes.items():
        if 0 < size < world_size:
            what = f"There are {size} images" if request.images else f"The {name} split has {size} samples"
            raise InputError(f"{what}, fewer than the {world_size} ranks: use fewer ranks.")


def check_lightning_limits(stated: Mapping[str, Any], plan: Plan) -> None:
    """Rejects limits of Lightning's Trainer that the training does not reach."""
    for name, most, flag in (("steps", plan.total_steps, "--max-steps"), ("epochs", plan.epochs, "--epochs")):
        if (least := stated.get(f"min_{name}") or 0) > most:
            raise InputError(f"trainer.min_{name} is {least}, but the training has {most} {name}: raise {flag}.")
    # `max_steps` may end the last epoch early.
    interval, batches = stated.get("val_check_interval"), plan.batches_in_epoch(plan.epochs - 1)
    if isinstance(interval, int | float) and interval > batches and plan.validate_every:
        last = "an epoch" if batches == plan.batches_per_epoch else "the last epoch"
        raise InputError(f"trainer.val_check_interval is {interval}, but {last} has {batches} batches: lower it.")
