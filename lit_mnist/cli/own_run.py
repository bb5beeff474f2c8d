"""Prepares and starts a run of the user's own module: parses its classes, claims the run folder, starts the ranks."""

from __future__ import annotations

import os
import shlex
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_mnist.checkpoint.store import CONFIG
from lit_mnist.cli.claim import writes_run_folder
from lit_mnist.cli.imports import import_packages
from lit_mnist.cli.own_cli import OwnModuleCLI
from lit_mnist.cli.own_request import OwnRequest
from lit_mnist.cli.own_resume import check_same, find_checkpoint, find_folder, find_newest, lock_resumed
from lit_mnist.cli.start import Ranks, run_ranks
from lit_mnist.cli.validate import check_accelerate, check_launch, choose_ranks
from lit_mnist.distributed.precision import explain_precision, resolve_precision
from lit_mnist.distributed.rank import launched_from_outside, print_once, threads_per_rank
from lit_mnist.distributed.terminal import display_path
from lit_mnist.engines.rank_work import do_job
from lit_mnist.errors import InputError
from lit_mnist.experiment import RunSettings, TrainerSettings
from lit_mnist.experiment.schema import SEED
from lit_mnist.plugins.recording.predictions import PREDICTIONS
from lit_mnist.plugins.strategy import SafeDDPStrategy
from lit_mnist.profiling.faults import fault_marker
from lit_mnist.report.run import report_metrics
from lit_mnist.run.finish import program
from lit_mnist.run.folder import METRICS, REPORT, RESULT, RunFolder, default_path
from lit_mnist.run.folder_lock import FolderLock
from lit_mnist.run.job import Job, Parts
from lit_mnist.run.metrics_log import read_metrics

_WRITES = {"predict": (PREDICTIONS,), "validate": (CONFIG, RESULT, REPORT), "test": (CONFIG, RESULT, REPORT)}
# Options that `Job` has in another form.
_OWN = ("devices", "accelerator", "num_nodes", "strategy", "precision")


def start_own(request: OwnRequest, command: str) -> None:
    """Prepares a job, and runs its ranks to their end.

    Args:
        request: The request.
        command: The command as it was typed.

    Raises:
        LitMnistError: The request is rejected, or the run failed or was stopped.
    """
    # The ranks are forked from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    check_accelerate()
    import_packages(request.imports)
    cli = OwnModuleCLI(request)
    job, folder = _prepare(request, cli, command)
    ranks = Ranks(partial(do_job, job), job.world_size, job.run, job.folder, partial(_how_to_resume, request, job))
    run_ranks(ranks, folder)


def _prepare(request: OwnRequest, cli: OwnModuleCLI, command: str) -> tuple[Job, RunFolder | None]:
    settings = request.settings
    of_run = RunSettings(**{key[4:]: value for key, value in settings.items() if key.startswith("run.")})
    given = {key[8:]: value for key, value in settings.items() if key.startswith("trainer.")}
    strategy = given.pop("strategy", "auto")
    trainer = TrainerSettings(**given)
    devices, world_size = choose_ranks(trainer)
    check_launch(of_run, world_size)
    if of_run.fault and of_run.fault[1] >= world_size:
        raise InputError(f"run.inject is {of_run.inject}, but the ranks are 0 to {world_size - 1}.")
    threads = threads_per_rank(of_run.threads, devices.count)
    # As of a stock Trainer: another precision is the user's choice.
    precision = resolve_precision(given.get("precision", "32-true"), devices.kind)
    if given.get("precision") == "auto":
        print_once(f"note: {explain_precision(devices.kind)}")
    config = {
        SEED: settings.get(SEED, 42),
        **cli.plain_classes(),
        "trainer": {**given, "strategy": strategy, "precision": precision, **cli.plain_options()},
        # The number of threads changes the rounding, and a resumed run needs the same.
        "run": {**_without(of_run, "dir", "resume", "inject"), "threads": threads},
    }
    path, origin = find_folder(request, of_run)
    with lock_resumed(request, of_run, path, origin) as lock:
        checkpoint = find_checkpoint(request, of_run, origin, world_size)
        if checkpoint and request.trains:
            check_same(checkpoint, config)
        folder = _claim(request, path, origin, lock, config) if writes_run_folder() else None
    options = {name: value for name, value in given.items() if name not in _OWN}
    job = Job(
        command=request.command,
        engine="lightning",
        run=of_run,
        config=config,
        seed=config[SEED],
        devices=devices,
        world_size=world_size,
        precision=precision,
        threads=threads,
        folder=folder.path if folder else path or default_path(_name(request)).absolute(),
        command_line=command,
        first_process=os.getppid() if launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
        make=partial(_make, cli, options, strategy),
        checkpoint=checkpoint,
        imports=request.imports,
        resumable=True,
        testable=True,
        report=report_metrics,
    )
    return job, folder


def _make(cli: OwnModuleCLI, options: dict[str, Any], strategy: str, job: Job) -> Parts:
    """Instantiates the user's classes, and returns the arguments of the Trainer."""
    module, data, made = cli.make(tuple(cli.plain_options()))
    options = {**options, **made}
    if job.world_size > 1:
        options["strategy"] = SafeDDPStrategy(
            process_group_backend="nccl" if job.devices.kind == "cuda" else "gloo",
            timeout=timedelta(seconds=job.run.timeout),
            find_unused_parameters=strategy == "ddp_find_unused_parameters_true",
        )
    return Parts(module, data, options, module)


def _without(run: RunSettings, *names: str) -> dict[str, Any]:
    """Returns the settings of `run` that this module has and that differ from their defaults."""
    return {
        name: value for name, value in vars(run).items() if name not in names and value != getattr(RunSettings(), name)
    }


def _name(request: OwnRequest) -> str:
    """Returns the last part of the name of a new run folder."""
    name = request.classes["model"].rpartition(".")[2]
    return name if request.command == "train" else f"{name}-{request.command}"


def _claim(
    request: OwnRequest, path: Path | None, origin: Path | None, lock: FolderLock | None, config: dict[str, Any]
) -> RunFolder:
    """Claims the run folder, and writes its configuration."""
    in_place = path is not None and origin == path
    if path and in_place:
        read_metrics(path)
    folder = RunFolder.claim(
        path,
        name=_name(request),
        writes=_WRITES.get(request.command, (CONFIG, RESULT, METRICS, REPORT, "checkpoints")),
        folders=("checkpoints", "tensorboard") if request.trains else (),
        resumed=in_place,
        lock=lock,
    )
    try:
        if request.trains and not in_place:
            fault_marker(folder.path).unlink(missing_ok=True)
        if request.command != "predict":
            folder.write_config(config)
    except OSError as error:
        folder.undo()
        raise InputError(f"The run folder {folder.path} cannot be written: {error.strerror}.") from error
    return folder


def _how_to_resume(request: OwnRequest, job: Job, only_with_checkpoint: bool) -> str:
    if not job.trains:
        return ""
    damaged: list[str] = []
    found = find_newest(job.folder, damaged.append)
    notes = "".join(f"\n{note}" for note in damaged)
    imports = "".join(f" --import {name}" for name in request.imports)
    command = f"{program()} fit --resume {shlex.quote(display_path(job.folder))}{imports}"
    if found is None:
        return notes if only_with_checkpoint else f"{notes}\nThere is no checkpoint to resume from: see --save-every."
    newest = f"The newest valid checkpoint, after step {found.step}, is {display_path(found.path)}"
    return f"{notes}\n{newest}; resume with: {command}"
