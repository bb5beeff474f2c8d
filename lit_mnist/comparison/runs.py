"""The runs of a comparison: each engine once with a trace; then in turn, for the timing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.comparison.equality import Run
from lit_mnist.comparison.variants import Main, Variant
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.terminal import print_line
from lit_mnist.engines.capabilities import CAPABILITIES, check_engine, load_engine
from lit_mnist.engines.device_checks import check_devices
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, flatten
from lit_mnist.run.timing import WARM_UP_STEPS


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        main: Runs a command line with an engine in this process, and returns its exit code.
        variants: What to compare.
        flags: The experiment's long flags, but those of devices and run folder.
        ranks: Number of ranks of the distributed engines.
        repeats: Timed runs of each; 0 for none.
        timed_steps: Optimizer steps of a timed run.
    """

    main: Main
    variants: list[Variant]
    flags: list[str]
    ranks: int
    repeats: int
    timed_steps: int


def why_not(variant: Variant, experiment: Experiment, devices: Devices) -> str | None:
    """Returns why an engine cannot be run here, or None; its module is imported."""
    try:
        settings = {**dict(flatten(experiment.to_dict())), "run.servers": 1, "trainer.devices": 1}
        check_engine(variant.engine, "train", settings)
        load_engine(variant.engine)
        if CAPABILITIES[variant.engine].processes != "one":
            check_devices(variant.engine, experiment, devices, devices.count)
        elif devices.count > 1 and variant.start != "agent":
            return "it has one process"
        if devices.count == 1 and variant.start != "agent":
            return "there is one rank: nothing is launched"
    except InputError as error:
        return str(error)
    return None


def ranks_of(options: Options, variant: Variant) -> int:
    """Returns the number of ranks that a variant is run on."""
    return 1 if CAPABILITIES[variant.engine].processes == "one" else options.ranks


def _flags_of(options: Options, variant: Variant) -> list[str]:
    """Returns the flags of an engine's runs: the number of servers is for parameter servers."""
    is_server = variant.engine == "parameter_server"
    return [word for word in options.flags if is_server or not word.startswith("--run.servers=")]


def verify(options: Options, variants: Sequence[Variant], folder: Path, threads: int) -> dict[Variant, Run | str]:
    """Runs each variant once with a trace, and returns the run, or why it failed."""
    found: dict[Variant, Run | str] = {}
    for number, variant in enumerate(variants, start=1):
        print(f"[{number}/{len(variants)}] {variant.name}: training with a trace", flush=True)
        found[variant] = train_with_trace(options, variant, folder / variant.folder, threads)
    return found


def train_with_trace(options: Options, variant: Variant, run_dir: Path, threads: int, *more: str) -> Run | str:
    """Runs a variant with a trace, and returns the run, or why it failed; `more` are further flags."""
    # As many threads for all, since the bits depend on them.
    flags = [
        *_flags_of(options, variant),
        f"--run.threads={threads}",
        "--run.trace=traffic",
        f"--run.dir={run_dir}",
        *more,
    ]
    log = run_dir.with_suffix(".log")
    code = variant.run(flags, ranks_of(options, variant), log, main=options.main)
    return Run.read(run_dir) if code == 0 else f"exit code {code}: {_last_words(log)}"


def _last_words(log: Path) -> str:
    """Returns the message of a run that failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    start = max((n for n, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 1)
    # A traceback's last line says what was wrong; below it stands how to go on.
    told = [
        line
        for line in lines[start:]
        if not line.startswith(("There is no checkpoint", "The newest sound", "The training was"))
    ]
    return " ".join(dict.fromkeys((told or ["nothing was said"])[:: max(1, len(told) - 1)])).removeprefix("error: ")


def measure(
    options: Options, variants: Sequence[Variant], folder: Path
) -> tuple[dict[Variant, list[dict[str, Any]]], dict[Variant, str]]:
    """Runs the variants in turn, as a user would start them; returns their results, and why some failed."""
    timed: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
    failed: dict[Variant, str] = {}
    steps = options.timed_steps
    if steps <= WARM_UP_STEPS and options.repeats:
        told = f"nothing is timed: the training has {steps} steps, and the first {WARM_UP_STEPS} would not count"
        print_line(f"note: {told}")
        return timed, failed
    for repeat in range(options.repeats):
        for variant in variants:
            print(f"[timing {repeat + 1}/{options.repeats}] {variant.name}", flush=True)
            with tempfile.TemporaryDirectory() as scratch:
                run_dir = Path(scratch) / "run"
                own = ("--trainer.max_steps=", "--run.cuda_graph=")
                flags = [word for word in _flags_of(options, variant) if not word.startswith(own)]
                # Kernel by kernel, as all engines can: a GPU's recorded graph would hide what each costs.
                fixed = (f"--trainer.max_steps={steps}", "--run.cuda_graph=false", f"--run.dir={run_dir}")
                words = ["fit", *flags, *fixed]
                log = folder / f"{variant.folder}.log"
                code = variant.run(words, ranks_of(options, variant), log)
                if code:
                    failed[variant] = f"a timed run ended with exit code {code}: {_last_words(log)}"
                else:
                    timed[variant].append(json.loads((run_dir / "result.json").read_text()))
    return timed, failed
