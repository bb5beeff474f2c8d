"""Checks and loads everything before a rank starts, so that a wrong input costs one message and no process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from lit_mnist.checkpoint.format import BEST, LAST, find_checkpoint, find_weights
from lit_mnist.checkpoint.resume import Saved
from lit_mnist.checkpoint.store import newest_valid
from lit_mnist.checkpoint.weights import read_weights
from lit_mnist.cli.checks import (
    check_accelerate,
    check_batch_norm,
    check_deterministic,
    check_evaluation,
    check_launch,
    check_steps,
)
from lit_mnist.cli.claim import claim_folder, continues_in_place, locked_to_resume
from lit_mnist.cli.parser import Request
from lit_mnist.cli.samples import load_samples
from lit_mnist.distributed.devices import Devices, choose_devices
from lit_mnist.distributed.rank import Rank, launched_from_outside, print_once, threads_per_rank, warn_once
from lit_mnist.distributed.terminal import shown
from lit_mnist.engines.capabilities import Capabilities, load_engine
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, TrainerSettings
from lit_mnist.experiment.plan import Plan
from lit_mnist.run.folder import RESULT, RunFolder
from lit_mnist.training.job import Job, plan_for
from lit_mnist.training.precision import resolve_precision


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to start.

    Attributes:
        job: The job.
        folder: The claimed run folder; None on the ranks that do not write.
    """

    job: Job
    folder: RunFolder | None


def prepare(request: Request, *, engine: str, command: str) -> Prepared:
    """Checks and loads everything.

    Raises:
        InputError: Something is wrong; nothing was written.
    """
    check_accelerate()
    with locked_to_resume(request) as lock:
        return _prepare(request, lock, engine=engine, command=command)


def _prepare(request: Request, lock: IO[str] | None, *, engine: str, command: str) -> Prepared:
    saved = _saved(request)
    trains = request.trains
    base = None if saved is None else saved.to_resume() if trains else saved.to_evaluate()
    experiment, extras = request.experiment(base), request.extras.names
    if saved and trains and experiment.trainer.precision == "auto":
        # A file may state it again: it means what it meant when the training began, on whatever machine.
        experiment = experiment.replace("trainer", precision=saved.section["precision"])
    capabilities: Capabilities = load_engine(engine).CAPABILITIES
    capabilities.check(engine, request.command, experiment, extras)
    stated = _checked_options(request, experiment)
    if saved and trains:
        if not capabilities.resume:
            raise InputError(f"The engine {engine} cannot go on from {saved.path}: choose another --run-dir.")
        saved.check_same(experiment)
    (devices, world_size), lr = _ranks(experiment.trainer), experiment.model.lr
    capabilities.check_devices(engine, experiment, devices, world_size)
    cuda_graph = trains and capabilities.uses_cuda_graph(engine, experiment, devices, world_size, extras)
    check_launch(experiment.run, world_size)
    fetch = saved is None or saved.may_fetch(request.settings, experiment.data, trains=trains)
    dataset, splits, files = load_samples(experiment, [Path(image) for image in request.images], fetch=fetch)
    if experiment.trainer.devices == "auto" and request.command == "predict" and not launched_from_outside():
        devices = Devices(devices.kind, devices.numbers[: len(splits.test)])
        world_size = devices.count
    check_evaluation(request, splits, world_size)
    plan = plan_for(experiment, splits, world_size) if trains else Plan.without_training(world_size, lr)
    in_one = capabilities.processes == "devices"
    if in_one:
        # One process takes the whole batch; the devices count where `batch_per` multiplies by the ranks.
        plan = replace(plan, world_size=1)
    check_steps(experiment.run, plan)
    if trains:
        check_batch_norm(experiment, plan, world_size)
        check_deterministic(experiment, devices.kind)
    if saved and trains:
        # It may have been lost while it tested its weights.
        may_be_done = continues_in_place(request) and not (Path(str(request.run_dir)) / RESULT).exists()
        saved.check_resume(experiment, dataset, plan, may_be_done=may_be_done)
        print_once(f"note: going on from {shown(saved.path.absolute())} after step {saved.step}")
    elif saved:
        saved.check_evaluation(experiment, dataset, validates=request.command == "validate")
    weights = None if saved else read_weights(experiment.model, num_classes=dataset.num_classes, report=print_once)
    folder, claimed = claim_folder(request, experiment, saved, lock, stated)
    _check_best_is_known(request, claimed, saved, plan)
    job = Job(
        command=request.command,
        engine=engine,
        experiment=experiment,
        dataset=dataset,
        splits=splits,
        plan=plan,
        devices=devices,
        precision=resolve_precision(experiment.trainer.precision, devices.kind),
        threads=_threads(experiment.run.threads, saved if trains else None, 1 if in_one else devices.count),
        folder=folder,
        command_line=command,
        first_process=os.getppid() if launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
        checkpoint=_to_read(saved, claimed, trains=trains) if saved else None,
        weights=weights,
        files=files,
        extras=_further_options(request) if extras else None,
        stated=stated,
        cuda_graph=cuda_graph,
        resumable=capabilities.resume,
        testable="test" in capabilities.commands,
    )
    if trains and plan.dropped:
        rest, fill, are = (plan.dropped, "fill", "are") if plan.dropped > 1 else (1, "fills", "is")
        samples = f"{rest} sample{'s' * (rest != 1)} of each epoch"
        print_once(f"note: {samples} {fill} no whole batch of {plan.batch_size} and {are} left out")
    return Prepared(job, claimed)


def _saved(request: Request) -> Saved | None:
    """Reads the checkpoint that the command line names."""
    if not request.trains:
        if not request.checkpoint:
            raise InputError(f"{request.command} needs --ckpt RUN_DIR_OR_CKPT: the trained weights.")
        return Saved.read(find_weights(Path(request.checkpoint), print_once), hashed=False)
    if request.resume == "auto" and not request.run_dir:
        raise InputError("--resume auto goes on in the folder that --run-dir names: give --run-dir, too.")
    found = None
    if continues_in_place(request):
        place = Path(str(request.run_dir))
        found = newest_valid(place, warn_once)
        if found is None and list(place.glob("checkpoints/*.ckpt")):
            raise InputError(f"The folder {place} holds checkpoints, but no sound one to go on from: put them aside.")
    if found is None and request.resume and request.resume != "auto":
        place = Path(request.resume)
        if not place.is_dir():
            return Saved.read(find_checkpoint(place, (LAST,)))
        found = newest_valid(place, warn_once)
        if found is None:
            raise InputError(f"The folder {place} holds no sound checkpoint to go on from.")
    return Saved.read(found.path) if found else None


def _checked_options(request: Request, experiment: Experiment) -> dict[str, Any]:
    """Returns what a configuration file says of the further options of Lightning's Trainer."""
    if not request.extras.names:
        return {}
    from lit_mnist.cli.lightning_cli import check_trainer_options

    return check_trainer_options(request.extras, experiment)


def _further_options(request: Request) -> Callable[[], dict[str, Any]]:
    """Returns what makes the further options of Lightning's Trainer in each rank."""
    from lit_mnist.cli.lightning_cli import make_trainer_options

    return partial(make_trainer_options, request.extras.names, request.extras.words)


def _threads(setting: int | None, resumed: Saved | None, local_world_size: int) -> int:
    """Returns the number of threads of each rank."""
    if resumed:
        return resumed.threads(setting, local_world_size, warn_once)
    return threads_per_rank(setting, local_world_size)


def _to_read(saved: Saved, claimed: RunFolder | None, *, trains: bool) -> Path:
    """Returns the checkpoint that the ranks read: that of another run is copied, since it may change."""
    if not trains or claimed is None or launched_from_outside() or saved.is_in(claimed.checkpoints):
        return saved.path
    return claimed.checkpoints / LAST


def _check_best_is_known(request: Request, folder: RunFolder | None, saved: Saved | None, plan: Plan) -> None:
    """Rejects a complete training whose best weights, which are to be tested, are not there.

    Raises:
        InputError: They are not.
    """
    if not folder or not saved or request.command != "train":
        return
    if saved.step == plan.total_steps and not (folder.checkpoints / BEST).exists():
        folder.release()
        raise InputError(
            f"The training in {folder.path} is complete, but its best weights are not known: test the last ones with "
            f"test --ckpt {folder.checkpoints / LAST}."
        )


def _ranks(trainer: TrainerSettings) -> tuple[Devices, int]:
    """Returns this machine's devices and the number of all ranks."""
    if not launched_from_outside():
        if trainer.num_nodes > 1:
            raise InputError(
                f"trainer.num_nodes is {trainer.num_nodes}: start the ranks of several machines by torchrun."
            )
        devices = choose_devices(trainer)
        return devices, devices.count
    rank = Rank.from_environment()
    wanted = len(trainer.devices) if isinstance(trainer.devices, list) else trainer.devices
    if wanted not in {"auto", rank.local_world_size}:
        raise InputError(
            f"trainer.devices is {trainer.devices}, but the launcher has started {rank.local_world_size} ranks on this "
            "machine: leave --devices out."
        )
    if trainer.num_nodes not in {1, rank.num_nodes}:
        raise InputError(
            f"trainer.num_nodes is {trainer.num_nodes}, but the launcher has started ranks on {rank.num_nodes} "
            "machine(s): leave it out."
        )
    own = replace(trainer, devices=trainer.devices if isinstance(trainer.devices, list) else rank.local_world_size)
    return choose_devices(own), rank.world_size
