"""Turns a parsed request into a job that is ready to start: validate, load, plan, claim the run folder.

Every check comes before the first write, so that rejected input costs one message and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.format import LAST
from lit_mnist.checkpoint.weights import read_weights
from lit_mnist.cli.claim import claim, lock_resumed_folder
from lit_mnist.cli.parser import Request
from lit_mnist.cli.validate import Validated, resumes_in_place, validate
from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import launched_from_outside, print_once, threads_per_rank, warn_once
from lit_mnist.distributed.terminal import display_path
from lit_mnist.engines.capabilities import CAPABILITIES, load_engine
from lit_mnist.errors import InputError
from lit_mnist.experiment import RunSettings
from lit_mnist.experiment.plan import Plan, explain_peak
from lit_mnist.experiment.registry import NETWORKS
from lit_mnist.models.build import build_net
from lit_mnist.run.folder import RESULT, RunFolder
from lit_mnist.training.job import Job, Splits, plan_for, split_dataset
from lit_mnist.training.precision import explain_precision, resolve_precision


def prepare(request: Request, *, engine: str, command: str) -> tuple[Job, RunFolder | None]:
    """Checks and loads everything that a run needs.

    Args:
        request: The parsed request.
        engine: Name of the engine.
        command: The command as it was typed.

    Returns:
        The job, and the claimed run folder on the process that writes it (None on the others).

    Raises:
        InputError: The request is rejected; nothing was written.
    """
    # The ranks are forked from this process and inherit the import.
    load_engine(engine)
    capabilities = CAPABILITIES[engine]
    with lock_resumed_folder(request) as lock:
        validated = validate(request, engine)
        experiment = validated.experiment
        dataset, splits, files = _load_samples(validated)
        if experiment.model.net in NETWORKS:
            # Checks the network before anything is written.
            build_net(experiment.model, num_classes=dataset.num_classes, seed=experiment.seed_everything)
        weights = None
        if validated.saved is None:
            weights = read_weights(experiment.model, num_classes=dataset.num_classes, report=print_once)
        plan, devices = _plan(validated, dataset, splits)
        threads = _threads(validated, 1 if capabilities.processes == "devices" else devices.count)
        path, folder = claim(validated, plan, lock)
    if experiment.trainer.precision == "auto":
        print_once(f"note: {explain_precision(devices.kind)}")
    extras = None
    if request.extras.names:
        from lit_mnist.cli.lightning_cli import make_trainer_options

        extras = partial(make_trainer_options, request.extras.names, request.extras.words)
    job = Job(
        command=request.command,
        engine=engine,
        experiment=experiment,
        dataset=dataset,
        splits=splits,
        plan=plan,
        devices=devices,
        precision=resolve_precision(experiment.trainer.precision, devices.kind),
        threads=threads,
        folder=path,
        command_line=command,
        first_process=os.getppid() if launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
        checkpoint=_checkpoint(validated, folder),
        weights=weights,
        files=files,
        extras=extras,
        stated=validated.stated,
        cuda_graph=validated.cuda_graph,
        resumable=capabilities.resume,
        testable="test" in capabilities.commands,
        imports=request.imports,
    )
    return job, folder


def _load_samples(validated: Validated) -> tuple[Dataset, Splits, tuple[Path, ...]]:
    """Returns the data set, its splits, and the files of the user's images, which replace the test split."""
    request, experiment, saved = validated.request, validated.experiment, validated.saved
    fetch = saved is None or saved.may_fetch(request.settings, experiment.data, trains=request.trains)
    if not request.images:
        dataset = load_dataset(experiment.data, fetch=fetch)
        return dataset, split_dataset(experiment, dataset, request.command), ()
    if experiment.trainer.limit_of("predict") is not None:
        raise InputError("trainer.limit_predict_batches applies to the test split: pass fewer --images instead.")
    # Imported here because only this command needs it.
    from lit_mnist.predict.digits import load_user_images
    from lit_mnist.predict.user_images import find_images

    files = tuple(find_images([Path(image) for image in request.images]))
    dataset = load_user_images(files, experiment.data, fetch=fetch)
    return dataset, Splits(dataset.train, dataset.train, dataset.test), files


def _plan(validated: Validated, dataset: Dataset, splits: Splits) -> tuple[Plan, Devices]:
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
    _check_steps(experiment.run, plan)
    if request.trains:
        _check_lightning_limits(validated.stated, plan)
    if saved and request.trains:
        # The run may have been interrupted while it tested its weights.
        may_be_done = resumes_in_place(request) and not (Path(str(request.run_dir)) / RESULT).exists()
        saved.check_resume(experiment, dataset, plan, may_be_done=may_be_done)
        print_once(f"note: resuming from {display_path(saved.path.absolute())} after step {saved.step}")
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


def _check_steps(run: RunSettings, plan: Plan) -> None:
    """Rejects an injected fault or a traced step that the run does not reach."""
    if run.trace_step is not None and run.trace_step > plan.total_steps:
        raise InputError(f"run.trace_step is {run.trace_step}, but the steps are 1 to {plan.total_steps}.")
    if run.fault and (run.fault[1] >= plan.world_size or run.fault[2] > plan.total_steps):
        ranks, steps = f"0 to {plan.world_size - 1}", f"1 to {plan.total_steps}"
        raise InputError(f"run.inject is {run.inject}, but the ranks are {ranks}, and the steps {steps}.")


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


def _threads(validated: Validated, local_world_size: int) -> int:
    """Returns the number of threads of each rank, which a resumed training keeps."""
    setting, saved = validated.experiment.run.threads, validated.saved
    if saved and validated.request.trains:
        return saved.threads(setting, local_world_size, warn_once)
    return threads_per_rank(setting, local_world_size)


def _checkpoint(validated: Validated, folder: RunFolder | None) -> Path | None:
    """Returns the checkpoint that the ranks read: a copy if it belongs to another run, which may change it."""
    saved = validated.saved
    if saved is None:
        return None
    if not validated.request.trains or folder is None or launched_from_outside() or saved.is_in(folder.checkpoints):
        return saved.path
    return folder.checkpoints / LAST
