"""Trains one experiment with several engines, and reports whether they are equal and what they cost.

python train.py compare --engines all --devices 2 --max-steps 200
python train.py compare --engines single,raw_ddp,lightning --config configs/basicnet.yaml --repeats 5
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.comparison.equality import Run
from lit_mnist.comparison.results import engine_results
from lit_mnist.comparison.runs import Main, Options, Outcome, Variant, choose_variants, measure, skip, train_with_trace
from lit_mnist.comparison.summary import text, write_comparison
from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.devices import Devices, choose_devices
from lit_mnist.distributed.precision import resolve_precision
from lit_mnist.distributed.rank import launched_from_outside, threads_per_rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_labelled
from lit_mnist.errors import InputError, StoppedError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.learning_rate import scaled_lr
from lit_mnist.experiment.registry import NETWORKS
from lit_mnist.experiment.schema import as_flags
from lit_mnist.models.build import build_net
from lit_mnist.profiling.timing import WARM_UP_STEPS, commit, versions
from lit_mnist.run.folder import RunFolder
from lit_mnist.training.job import plan_for, split_dataset

JSON, PAGE = "comparison.json", "comparison.html"
_TIMED_STEPS = 120


def compare(
    experiment: Experiment,
    settings: Mapping[str, Any],
    flags: Mapping[str, str],
    *,
    imports: Sequence[str],
    typed: str,
    main: Main,
) -> int:
    """Runs a comparison, and returns the exit code: 0 if all engines agree as expected, otherwise 1.

    Args:
        experiment: The experiment.
        settings: Those of its settings that were given, by dotted keys.
        flags: The values of `--engines`, `--repeats` and `--timed-steps`, as far as they were given.
        imports: The user's packages, which a run imports first.
        typed: The command as it was typed.
        main: Runs a command line with an engine in this process, and returns its exit code.

    Raises:
        InputError: The command line or the experiment is rejected; nothing was run.
    """
    options = _with_defaults(flags)
    _check(experiment)
    dataset = load_dataset(experiment.data)
    if experiment.model.net in NETWORKS:
        # Checks the network once; the runs are forked from this process.
        torch.set_num_threads(1)
        build_net(experiment.model, num_classes=dataset.num_classes, seed=experiment.seed_everything)
    devices = choose_devices(experiment.trainer)
    plan = plan_for(experiment, split_dataset(experiment, dataset), devices.count)
    variants = choose_variants(options["--engines"])
    path = Path(experiment.run.dir).absolute() if experiment.run.dir else None
    folder = RunFolder.claim(path, name="compare", writes=(JSON, PAGE, *(variant.folder for variant in variants)))
    STOP.listen(_stop)
    runs = Options(
        main=main,
        variants=variants,
        flags=[
            *(f"--import={name}" for name in imports),
            *_experiment_flags(settings),
            "--data.batch_per=global",
            f"--data.batch_size={plan.batch_size}",
            "--model.lr_scale=none",
            # Each run lowers it for its number of steps.
            f"--model.lr={scaled_lr(experiment.model, devices.count)!r}",
        ],
        ranks=devices.count,
        threads=threads_per_rank(experiment.run.threads, devices.count),
        repeats=int(options["--repeats"]),
        timed_steps=min(int(options["--timed-steps"]), plan.total_steps),
        folder=folder.path,
    )
    steps, ranks = plan.total_steps, f"{runs.ranks} rank{'s' * (runs.ranks != 1)}"
    begun = f"compare: {len(variants)} engines, {experiment.model.net} on {dataset.name}, {steps} steps, {ranks}"
    print_labelled("running", begun)
    try:
        outcomes, timed = _run_all(runs, experiment, devices)
        results = engine_results(runs, outcomes, timed)
    finally:
        runs.display.clear()
        folder.release()
    comparison = {
        "experiment": experiment.to_dict(),
        "world_size": runs.ranks,
        "precision": resolve_precision(experiment.trainer.precision, devices.kind),
        "device": next((run.result["device"] for run in outcomes.values() if isinstance(run, Run)), devices.kind),
        "threads": runs.threads,
        "steps": plan.total_steps,
        "data": {"name": dataset.name, "source": dataset.source, "sha256": dataset.sha256},
        "versions": versions(),
        "commit": commit(),
        "command": typed,
        "repeats": runs.repeats,
        "warm_up_steps": WARM_UP_STEPS,
        **results,
    }
    write_text(folder.path / JSON, json.dumps(comparison, indent=2) + "\n")
    write_comparison(folder.path / PAGE, comparison)
    print(text(comparison))
    print()
    print_labelled("results", f"{display_path(folder.path / JSON)}, {display_path(folder.path / PAGE)}")
    print_labelled("open", f"python -m webbrowser {shlex.quote(display_path(folder.path / PAGE))}")
    return 0 if comparison["equal"] else 1


def _run_all(
    options: Options, experiment: Experiment, devices: Devices
) -> tuple[dict[Variant, Outcome], dict[Variant, list[dict[str, Any]]]]:
    """Runs all engines; returns the traced run of each, or why there is none, and the results of its timed runs."""
    # Imports every engine once, before the runs are forked from this process.
    skipped = {variant: skip(variant, experiment, devices) for variant in options.variants}
    runnable = [variant for variant in options.variants if not skipped[variant]]
    outcomes: dict[Variant, Outcome] = {variant: found for variant, found in skipped.items() if found}
    for n, variant in enumerate(runnable, start=1):
        options.display.begin(f"engine {n}/{len(runnable)}  {variant.name}  training with a trace")
        outcomes[variant] = train_with_trace(options, variant, options.folder / variant.folder)
    timed, failed = measure(options, [variant for variant in runnable if isinstance(outcomes[variant], Run)])
    outcomes.update(failed)
    return outcomes, timed


def _stop(signum: signal.Signals) -> None:
    raise StoppedError(f"Stopped by {signum.name}.", signum)


def _check(experiment: Experiment) -> None:
    """Rejects options that `compare`, or one of the engines, does not support."""
    if launched_from_outside():
        raise InputError("compare starts the ranks: run it without a launcher.")
    run = experiment.run
    if run.resume:
        raise InputError("compare trains from the beginning: omit --resume.")
    for name in ("save_every", "max_restarts", "inject", "cuda_graph"):
        if getattr(run, name):
            raise InputError(f"run.{name} is not supported by every engine: remove it.")
    if run.launcher != "agent":
        raise InputError("compare selects the launcher by the name of the engine: --engines raw_ddp:spawn.")
    if isinstance(experiment.trainer.devices, list):
        raise InputError("compare accepts a number of devices: select GPUs with CUDA_VISIBLE_DEVICES.")


def _with_defaults(given: Mapping[str, str]) -> dict[str, str]:
    options = {"--engines": "all", "--repeats": "3", "--timed-steps": str(_TIMED_STEPS), **given}
    for name, least in (("--repeats", 0), ("--timed-steps", WARM_UP_STEPS + 1)):
        if not options[name].isdecimal() or int(options[name]) < least:
            raise InputError(f"{name} must be a whole number of at least {least}, but is {options[name]}.")
    return options


def _experiment_flags(settings: Mapping[str, Any]) -> list[str]:
    """Returns the given settings as flags, except those that `compare` sets itself."""
    own = ("trainer.devices", "run.dir", "run.trace", "run.launcher", "data.batch_size", "data.batch_per")
    return as_flags({key: value for key, value in settings.items() if key not in own})
