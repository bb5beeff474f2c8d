"""Runs the chosen engines on one experiment, and says whether they are equal and what they cost.

python train.py compare --engines all --devices 2 --max-steps 200
python train.py compare --engines single,raw_ddp,lightning --config configs/basicnet.yaml --repeats 5
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.compare import features
from lit_mnist.compare.cost import cost_of
from lit_mnist.compare.equality import Difference, Run, compare_runs, largest_difference
from lit_mnist.compare.variants import Variant, choose_variants
from lit_mnist.configure import configure
from lit_mnist.data.dataset import load_dataset
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.flags import read_command_line
from lit_mnist.job import plan_for, split_dataset
from lit_mnist.launch import raise_on
from lit_mnist.offer import INSTALL, Offer, load_engine
from lit_mnist.ranks import Devices, choose_devices, launched_from_outside, threads_per_rank
from lit_mnist.report.comparison import write_comparison
from lit_mnist.report.comparison_text import table
from lit_mnist.training.digest import content_sha256
from lit_mnist.training.files import write_text
from lit_mnist.training.measure import WARM_UP_STEPS, commit, versions
from lit_mnist.training.precision import resolve_precision
from lit_mnist.training.run_folder import RunFolder, default_path, shown

JSON, PAGE = "comparison.json", "comparison.html"
_TIMED_STEPS = 120


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        variants: What to compare.
        flags: The experiment's long flags, but those of devices and run folder.
        ranks: Number of ranks of the distributed engines.
        repeats: Timed runs of each; 0 for none.
        timed_steps: Optimizer steps of a timed run.
        features: Whether to find out who does what.
    """

    variants: list[Variant]
    flags: list[str]
    ranks: int
    repeats: int
    timed_steps: int
    features: bool


def compare(argv: list[str], command: str) -> int:
    """Runs a comparison, and returns 0 where all engines do what is expected of them, else 1.

    Raises:
        InputError: The command line or the experiment is refused; nothing was run.
    """
    if launched_from_outside():
        raise InputError("compare starts the ranks itself: run it without a launcher.")
    own, rest = _own_flags(argv)
    line = read_command_line(rest)
    configuration = configure(line.arguments)
    experiment = configuration.experiment
    if configuration.extras.names:
        raise InputError(f"trainer.{configuration.extras.names[0]} is Lightning's alone: it cannot be compared.")
    run = experiment.run
    if run.resume or line.verb != "train":
        raise InputError("compare trains from the beginning: leave --resume and other commands out.")
    for name, asked in (("save_every", run.save_every), ("max_restarts", run.max_restarts)):
        if asked:
            raise InputError(f"run.{name} is not offered by every engine: it cannot be compared.")
    if run.launcher != "agent":
        raise InputError("run.launcher is chosen by the engine's name here: --engines raw_ddp:spawn.")
    if isinstance(experiment.trainer.devices, list):
        raise InputError("compare takes a number of devices: choose GPUs by CUDA_VISIBLE_DEVICES.")
    data = experiment.data
    dataset = load_dataset(data.name, Path(data.root) if data.root else None, data.emnist_split)
    devices = choose_devices(experiment.trainer)
    plan = plan_for(experiment, split_dataset(experiment, dataset), devices.count)
    threads = threads_per_rank(experiment.run.threads, devices.count)
    options = Options(
        variants=choose_variants(own["--engines"]),
        flags=[*_experiment_flags(line.arguments), "--data.batch_per=global", f"--data.batch_size={plan.batch_size}"],
        ranks=devices.count,
        repeats=int(own["--repeats"]),
        timed_steps=min(int(own["--timed-steps"]), plan.total_steps),
        features=own["--features"] == "true",
    )
    path = (Path(experiment.run.dir) if experiment.run.dir else default_path("compare")).absolute()
    folder = RunFolder.claim(path, writes=(JSON, PAGE, *(variant.folder for variant in options.variants)))
    raise_on(signal.SIGTERM, signal.SIGINT)
    # Once here, and not in each run that is forked from this process.
    skipped = {variant: _refusal(variant, experiment, devices) for variant in options.variants}
    runnable = [variant for variant in options.variants if not skipped[variant]]

    verified = _verify(options, runnable, folder.path, threads)
    timed, failed = _time(options, [variant for variant in runnable if isinstance(verified[variant], Run)], folder.path)
    verified.update(failed)
    done = [variant for variant in runnable if isinstance(verified[variant], Run)]
    who = _who_does_what(options, done, folder.path, devices) if options.features else None
    comparison = {
        "experiment": experiment.to_dict(),
        "world_size": options.ranks,
        "precision": resolve_precision(experiment.trainer.precision, devices.kind),
        "device": next((run.result["device"] for run in verified.values() if isinstance(run, Run)), devices.kind),
        "threads": threads,
        "steps": plan.total_steps,
        "data": {"name": dataset.name, "source": dataset.source, "sha256": dataset.sha256},
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "repeats": options.repeats,
        "warm_up_steps": WARM_UP_STEPS,
        **_judge(options, verified, skipped, timed, folder.path, threads),
        "features": who,
    }
    write_text(folder.path / JSON, json.dumps(comparison, indent=2) + "\n")
    write_comparison(folder.path / PAGE, comparison)
    print(table(comparison))
    print(f"results   {shown(folder.path / JSON)}, {shown(folder.path / PAGE)}")
    sys.stdout.flush()
    return 0 if comparison["equal"] else 1


def _own_flags(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the command's own flags with their values, and what is left."""
    own = {"--engines": "all", "--repeats": "3", "--timed-steps": str(_TIMED_STEPS), "--features": "true"}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in own:
            rest.append(word)
            continue
        if not equals and (not words or words[0].startswith("-")):
            raise InputError(f"{name} needs a value.")
        own[name] = value if equals else words.pop(0)
    for name, least in (("--repeats", 0), ("--timed-steps", WARM_UP_STEPS + 1)):
        if not own[name].isdecimal() or int(own[name]) < least:
            raise InputError(f"{name} must be a whole number of at least {least}, but is {own[name]}.")
    if own["--features"] not in {"true", "false"}:
        raise InputError(f"--features must be true or false, but is {own['--features']}.")
    return own, rest


def _experiment_flags(arguments: Sequence[str]) -> list[str]:
    """Returns the flags without those that this command sets for each run itself."""
    own = ("--trainer.devices", "--run.dir", "--run.trace", "--run.launcher", "--data.batch_size", "--data.batch_per")
    return [word for word in arguments if word.partition("=")[0] not in own]


def _refusal(variant: Variant, experiment: Experiment, devices: Devices) -> str | None:
    """Returns why an engine cannot be run here, or None; its module is imported."""
    try:
        offer: Offer = load_engine(variant.engine).OFFER
        if offer.processes != "one":
            offer.check_devices(variant.engine, experiment, devices, devices.count)
        elif devices.count > 1 and variant.start != "agent":
            return "it has one process"
        offer.check(variant.engine, "train", experiment.replace("run", servers=1), ())
        if devices.count == 1 and variant.start != "agent":
            return "there is one rank: nothing is launched"
    except InputError as error:
        return str(error)
    return None


def _ranks(options: Options, variant: Variant) -> int:
    return 1 if load_engine(variant.engine).OFFER.processes == "one" else options.ranks


def _flags_of(options: Options, variant: Variant) -> list[str]:
    """Returns the flags of an engine's runs: the number of servers is for parameter servers."""
    is_server = variant.engine == "parameter_server"
    return [word for word in options.flags if is_server or not word.startswith("--run.servers=")]


def _verify(options: Options, variants: Sequence[Variant], folder: Path, threads: int) -> dict[Variant, Run | str]:
    """Runs each variant once with a trace, and returns the run, or why it failed."""
    found: dict[Variant, Run | str] = {}
    for number, variant in enumerate(variants, start=1):
        print(f"[{number}/{len(variants)}] {variant.name}: training with a trace", flush=True)
        found[variant] = _traced(options, variant, folder / variant.folder, threads)
    return found


def _traced(options: Options, variant: Variant, run_dir: Path, threads: int, *more: str) -> Run | str:
    # As many threads for all, since the bits depend on them.
    flags = [
        *_flags_of(options, variant),
        f"--run.threads={threads}",
        "--run.trace=traffic",
        f"--run.dir={run_dir}",
        *more,
    ]
    log = run_dir.with_suffix(".log")
    code = variant.run(flags, _ranks(options, variant), log, fresh=False)
    return Run.read(run_dir) if code == 0 else f"exit code {code}: {_last_words(log)}"


def _last_words(log: Path) -> str:
    """Returns the message of a run that failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    start = max((n for n, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 1)
    # A traceback's last line says what was wrong; below it stands how to go on.
    told = [line for line in lines[start:] if not line.startswith(("No epoch was", "The last ", "The training was"))]
    return " ".join(dict.fromkeys((told or ["nothing was said"])[:: max(1, len(told) - 1)])).removeprefix("error: ")


def _time(
    options: Options, variants: Sequence[Variant], folder: Path
) -> tuple[dict[Variant, list[dict[str, Any]]], dict[Variant, str]]:
    """Runs the variants in turn, as a user would start them; returns their results, and why some failed."""
    timed: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
    failed: dict[Variant, str] = {}
    steps = options.timed_steps
    if steps <= WARM_UP_STEPS and options.repeats:
        print(f"note: {steps} steps are too few to time: {WARM_UP_STEPS} are left out as warm-up", flush=True)
    for repeat in range(options.repeats):
        for variant in variants:
            print(f"[timing {repeat + 1}/{options.repeats}] {variant.name}", flush=True)
            with tempfile.TemporaryDirectory() as scratch:
                run_dir = Path(scratch) / "run"
                flags = [word for word in _flags_of(options, variant) if not word.startswith("--trainer.max_steps=")]
                words = ["fit", *flags, f"--trainer.max_steps={steps}", f"--run.dir={run_dir}"]
                log = folder / f"{variant.folder}.log"
                code = variant.run(words, _ranks(options, variant), log, fresh=True)
                if code:
                    failed[variant] = f"a timed run ended with exit code {code}: {_last_words(log)}"
                else:
                    timed[variant].append(json.loads((run_dir / "result.json").read_text()))
    return timed, failed


def _who_does_what(options: Options, variants: Sequence[Variant], folder: Path, devices: Devices) -> dict[str, Any]:
    """Watches a short training of each engine, and one that goes on where the engine offers it."""
    columns = list(dict.fromkeys(variant.engine for variant in variants))
    found: dict[str, dict[str, str]] = {}
    batch = 16 * options.ranks
    for engine in columns:
        offer: Offer = load_engine(engine).OFFER
        half = offer.half == "everywhere" or (offer.half == "cuda" and devices.kind == "cuda")
        notes = [folder / f"who-{engine}-{part}.jsonl" for part in ("trains", "goes-on")]
        log = folder / f"who-{engine}.log"
        with tempfile.TemporaryDirectory() as scratch:
            words = [
                *(f"--data.{name}={size}" for name, size in (("train_size", 4 * batch), ("val_size", batch))),
                f"--trainer.accelerator={'gpu' if devices.kind == 'cuda' else 'cpu'}",
                *(f"--data.test_size={batch}", f"--data.batch_size={batch}", f"--run.dir={scratch}/run"),
                *("--model.schedule=constant", "--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=1"),
                f"--trainer.precision={'16-mixed' if half else 'bf16-mixed'}",
            ]
            runs = [words, [f"--run.resume={scratch}/run", "--trainer.max_epochs=2"]]
            for part, flags in zip(notes, runs[: 1 + offer.resume], strict=False):
                watched = _Watched(engine, notes=str(part))
                code = watched.run(flags, _ranks(options, watched), log, fresh=False)
                if code:
                    print(f"note: who does what in {engine} is not known: its short training ended with {code}")
                    break
            else:
                found[engine] = features.read_notes(*notes)
        for path in (*notes, log):
            path.unlink(missing_ok=True)
    rows = [
        {"feature": name, "who": {engine: who[name] for engine, who in found.items()}} for name in features.FEATURES
    ]
    return {"columns": list(found), "rows": rows}


def _judge(
    options: Options,
    verified: dict[Variant, Run | str],
    skipped: dict[Variant, str | None],
    timed: dict[Variant, list[dict[str, Any]]],
    folder: Path,
    threads: int,
) -> dict[str, Any]:
    """Returns the reference, whether all engines are as equal to it as is expected, and each engine's figures."""
    runs = {variant: run for variant, run in verified.items() if isinstance(run, Run)}
    reference = _reference(options, runs)
    engines = []
    for variant in options.variants:
        entry: dict[str, Any] = {
            "name": variant.engine,
            "variant": None if variant.engine != "raw_ddp" else variant.start.replace("agent", "own launcher"),
            "world_size": _ranks(options, variant) if variant in verified else None,
            "status": "skipped",
            "reason": skipped[variant],
            "install": INSTALL if INSTALL in (skipped[variant] or "") else None,
        }
        if variant in runs:
            run = runs[variant]
            entry |= {
                "status": "ran",
                "weights_sha256": [_digest(found) for found in run.traces],
                "loss": run.losses,
                "test": _test_figures(run.result["test"]),
                "comparison": None,
                "cost": cost_of(features.PACKAGE / "engines" / f"{variant.engine}.py", run.traces, timed[variant]),
            }
            if reference and variant != reference:
                entry["comparison"] = _compared(options, runs, reference, variant, folder, threads)
        elif variant in verified:
            entry |= {"status": "failed", "reason": verified[variant]}
        engines.append(entry)
    equal = all(entry["status"] != "failed" and (entry.get("comparison") or {"met": True})["met"] for entry in engines)
    name = engines[options.variants.index(reference)] if reference else {}
    return {
        "reference": f"{name['name']} ({name['variant']})" if name.get("variant") else name.get("name"),
        "equal": bool(runs) and equal,
        "engines": engines,
    }


def _reference(options: Options, runs: dict[Variant, Run]) -> Variant | None:
    """Returns the run that the others are compared with: raw DDP, or on one rank the engine without distribution."""
    preferred = Variant("single") if options.ranks == 1 else Variant("raw_ddp")
    same_ranks = [variant for variant in runs if len(runs[variant].traces) == options.ranks]
    return preferred if preferred in runs else next(iter([*same_ranks, *runs]), None)


def _compared(
    options: Options, runs: dict[Variant, Run], reference: Variant, variant: Variant, folder: Path, threads: int
) -> dict[str, Any]:
    """Returns how a run compares with the reference; where weights differ, both are run again to see by how much."""
    expected = "bits" if len(runs[reference].traces) == len(runs[variant].traces) else "rounding"
    if "parameter_server" in {variant.engine, reference.engine}:
        # Its servers add up in another order than a ring. Adam divides each gradient by its own size, so that the
        # rounding of one near zero, as of a bias before batch norm, becomes a whole step.
        optimizer = runs[variant].result["config"]["model"]["optimizer"]
        expected = "1e-05 relative" if optimizer == "sgd" or options.ranks <= 2 else "rounding"
    found = compare_runs(runs[reference], runs[variant], expected=expected)
    difference = found["first_difference"]
    if difference and difference["what"] == "weights":
        step, rank, tensor = difference["step"], difference["rank"], difference["tensor"]
        kept = []
        for one in (reference, variant):
            run_dir = folder / f"{variant.folder}-step-{step}" / one.folder
            run_dir.parent.mkdir(exist_ok=True)
            again = _traced(options, one, run_dir, threads, f"--run.trace_step={step}")
            kept.append(again.kept_weights(rank, step) if isinstance(again, Run) else {})
        if all(tensor in weights for weights in kept):
            by = largest_difference({tensor: kept[0][tensor]}, kept[1])
            found["first_difference"] = Difference(step, "weights", rank, tensor, by).to_dict()
    return found


def _digest(trace: dict[str, Any]) -> str:
    """Returns one digest of a rank's final weights."""
    return content_sha256(trace["steps"][-1]["weights"])


def _test_figures(test: dict[str, Any] | None) -> dict[str, Any] | None:
    if test is None:
        return None
    right = sum(row[n] for n, row in enumerate(test["confusion"]))
    return {"right": right, **{name: test[name] for name in ("accuracy", "count", "loss")}}


@dataclass(frozen=True)
class _Watched(Variant):
    """An engine whose decisive calls are watched."""

    notes: str = os.devnull

    def _in_this_process(self, words: Sequence[str], ranks: int) -> int:
        features.install(self.engine, Path(self.notes))
        return super()._in_this_process(words, ranks)
