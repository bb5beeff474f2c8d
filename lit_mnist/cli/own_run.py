"""Prepares and starts a run of the user's own module: parses its classes, claims the run folder, starts the ranks."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lit_mnist.checkpoint.saved import Saved
from lit_mnist.checkpoint.store import CONFIG, find_newest_valid
from lit_mnist.cli.claim import Output, claim
from lit_mnist.cli.config_file import read_config_file
from lit_mnist.cli.imports import import_packages
from lit_mnist.cli.own_cli import OwnModuleCLI
from lit_mnist.cli.own_request import OwnRequest
from lit_mnist.cli.resume import checkpoint_to_read, find_saved, lock_resumed_folder, origin_of, report_resume
from lit_mnist.cli.start import Ranks, run_ranks
from lit_mnist.cli.validate import check_accelerate, check_launch, choose_ranks
from lit_mnist.distributed.precision import explain_precision, resolve_precision
from lit_mnist.distributed.rank import launched_from_outside, print_once, threads_per_rank, warn_once
from lit_mnist.distributed.terminal import display_path
from lit_mnist.engines.rank_work import do_job
from lit_mnist.errors import InputError
from lit_mnist.experiment import RunSettings, TrainerSettings
from lit_mnist.experiment.schema import SEED
from lit_mnist.plugins.exact_entry import check_saved
from lit_mnist.plugins.recording.predictions import PREDICTIONS
from lit_mnist.plugins.strategy import SafeDDPStrategy
from lit_mnist.report.run import report_metrics
from lit_mnist.run.finish import program
from lit_mnist.run.folder import RunFolder
from lit_mnist.run.job import Job, Parts

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
    # As of a stock Trainer: another precision is the user's choice.
    precision = resolve_precision(given.get("precision", "32-true"), devices.kind)
    if given.get("precision") == "auto":
        print_once(f"note: {explain_precision(devices.kind)}")
    with lock_resumed_folder(request) as lock:
        saved = _find_saved(request, world_size)
        if saved and request.trains:
            threads = saved.threads(of_run.threads, devices.count, warn_once)
        else:
            threads = threads_per_rank(of_run.threads, devices.count)
        config = {
            SEED: settings.get(SEED, 42),
            **cli.plain_classes(),
            "trainer": {**given, "strategy": strategy, "precision": precision, **cli.plain_options()},
            "run": _without(of_run, "dir", "resume", "inject"),
        }
        if saved and request.trains:
            saved.check_same(config)
            report_resume(saved)
        path, folder = claim(request, saved, Output(_name(request), config, predictions=(PREDICTIONS,)), lock)
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
        folder=path,
        command_line=command,
        first_process=os.getppid() if launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
        make=partial(_make, cli, options, strategy),
        imports=request.imports,
        resumable=True,
        testable=True,
        report=report_metrics,
        checkpoint=checkpoint_to_read(request, saved, folder),
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


def _find_saved(request: OwnRequest, world_size: int) -> Saved | None:
    """Returns the checkpoint to resume from, which as many ranks have saved, or to evaluate."""
    if not request.trains:
        return find_saved(request, partial(Saved.read, hashed=False))
    saved = find_saved(request, partial(Saved.read, check=lambda checkpoint: check_saved(checkpoint, world_size)))
    folder = origin_of(request, saved)
    if saved and folder and not saved.section:
        # The checkpoints of release 0.1 do not have the settings.
        return replace(saved, config=read_config_file(folder / CONFIG))
    return saved


def _how_to_resume(request: OwnRequest, job: Job, only_with_checkpoint: bool) -> str:
    if not job.trains:
        return ""
    damaged: list[str] = []
    found = find_newest_valid(job.folder, damaged.append)
    notes = "".join(f"\n{note}" for note in damaged)
    imports = "".join(f" --import {name}" for name in request.imports)
    command = f"{program()} fit --resume {shlex.quote(display_path(job.folder))}{imports}"
    if found is None:
        return notes if only_with_checkpoint else f"{notes}\nThere is no checkpoint to resume from: see --save-every."
    newest = f"The newest valid checkpoint, after step {found.step}, is {display_path(found.path)}"
    return f"{notes}\n{newest}; resume with: {command}"
