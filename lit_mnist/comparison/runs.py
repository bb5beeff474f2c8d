"""The runs of a comparison: a traced run of each engine, then timed runs in turns."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.config import flatten
from lit_mnist.comparison.equality import Run
from lit_mnist.comparison.progress import ComparisonDisplay
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.distributed.terminal import print_line
from lit_mnist.engines.capabilities import CAPABILITIES, ENGINES, check_engine, load_engine
from lit_mnist.engines.device_checks import check_devices
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment import Experiment
from lit_mnist.profiling.timing import WARM_UP_STEPS

# Runs a command line with an engine in this process, and returns its exit code.
Main = Callable[[list[str], str], int]


@dataclass(frozen=True)
class Variant:
    """An engine with the launcher of its ranks.

    Attributes:
        engine: Name of the engine.
        start: `agent`, `spawn` or `torchrun`.
    """

    engine: str
    start: str = "agent"

    @property
    def name(self) -> str:
        """The name on the command line, such as `raw_ddp:spawn`."""
        return self.engine if self.start == "agent" else f"{self.engine}:{self.start}"

    @property
    def folder(self) -> str:
        """The name of the run folder."""
        return self.name.replace(":", "-")

    def run(
        self, words: Sequence[str], ranks: int, log: Path, display: ComparisonDisplay, *, main: Main | None = None
    ) -> int:
        """Runs a training run in a child process, and returns its exit code.

        Args:
            words: The flags, except those of the launcher.
            ranks: Number of ranks.
            log: File for the output.
            display: Shows the progress meanwhile.
            main: If given, runs in a fork of this process, which starts at once; by default in a new Python.
        """
        child = os.fork()
        if child == 0:
            code = 99
            try:
                die_with_parent()
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                if main is None or self.start != "agent":
                    command = self._command(words, ranks)
                    os.execv(command[0], command)  # noqa: S606
                code = main([*words, "--devices", str(ranks)], self.engine)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        try:
            with display.drawn():
                _, status = os.waitpid(child, 0)
        except BaseException:
            _end(child)
            raise
        return os.waitstatus_to_exitcode(status)

    def _command(self, words: Sequence[str], ranks: int) -> list[str]:
        module = ["-m", f"lit_mnist.engines.{self.engine}", *words]
        if self.start == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return [sys.executable, *torchrun, *module]
        launcher = ["--launcher", "spawn"] if self.start == "spawn" else []
        return [sys.executable, *module, "--devices", str(ranks), *launcher]


VARIANTS = {
    variant.name: variant
    for engine in ENGINES
    for start in (("agent", "torchrun", "spawn") if engine == "raw_ddp" else ("agent",))
    for variant in [Variant(engine, start)]
}


def _end(child: int) -> None:
    """Sends SIGTERM to a run, whose launcher forwards it to the ranks, and kills it after five seconds."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGTERM)
        for _ in range(100):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def choose_variants(names: str) -> list[Variant]:
    """Returns the variants that `--engines` names: `all`, or names separated by commas.

    Raises:
        InputError: A name is unknown, or given twice.
    """
    if names == "all":
        return list(VARIANTS.values())
    chosen = names.split(",")
    for name in chosen:
        if name not in VARIANTS:
            hint = nearest(name, VARIANTS) or f": use all, {', '.join(VARIANTS)}."
            raise InputError(f"Unknown engine {name!r}{hint}")
        if chosen.count(name) > 1:
            raise InputError(f"--engines names {name} twice.")
    return [VARIANTS[name] for name in chosen]


@dataclass(frozen=True)
class Options:
    """The options of a comparison.

    Attributes:
        main: Runs a command line with an engine in this process, and returns its exit code.
        variants: The engines.
        flags: The long flags of the experiment, without devices and run folder.
        ranks: Number of ranks of the distributed engines.
        threads: Threads of each rank in the traced runs, which affect rounding.
        repeats: Timed runs of each engine; 0 for none.
        timed_steps: Optimizer steps of a timed run.
        folder: The folder of all runs.
        display: Shows which engine runs.
    """

    main: Main
    variants: list[Variant]
    flags: list[str]
    ranks: int
    threads: int
    repeats: int
    timed_steps: int
    folder: Path
    display: ComparisonDisplay = field(default_factory=ComparisonDisplay)


@dataclass(frozen=True)
class NotRun:
    """Why an engine has no results: it was `skipped`, or it `failed`."""

    status: str
    reason: str


Outcome = Run | NotRun


def skip(variant: Variant, experiment: Experiment, devices: Devices) -> NotRun | None:
    """Imports an engine, and returns why it cannot run here, or None."""
    try:
        settings = {**dict(flatten(experiment.to_dict())), "run.servers": 1, "trainer.devices": 1}
        check_engine(variant.engine, "train", settings)
        load_engine(variant.engine)
        if CAPABILITIES[variant.engine].processes != "one":
            check_devices(variant.engine, experiment, devices, devices.count)
        elif devices.count > 1 and variant.start != "agent":
            return NotRun("skipped", "it has one process")
    except InputError as error:
        return NotRun("skipped", str(error))
    if devices.count == 1 and variant.start != "agent":
        return NotRun("skipped", "there is one rank: nothing is launched")
    return None


def ranks_of(options: Options, variant: Variant) -> int:
    """Returns the number of ranks of a variant."""
    return 1 if CAPABILITIES[variant.engine].processes == "one" else options.ranks


def _flags(options: Options, variant: Variant, *without: str) -> list[str]:
    """Returns the flags for the runs of an engine; only parameter servers accept a number of servers."""
    omitted = without if variant.engine == "parameter_server" else (*without, "--run.servers=")
    return [word for word in options.flags if not word.startswith(omitted)]


def train_with_trace(options: Options, variant: Variant, run_dir: Path, *flags: str) -> Outcome:
    """Runs a variant with a trace, and returns the run, or why it failed."""
    fixed, log = (f"--run.threads={options.threads}", "--run.trace=traffic"), run_dir.with_suffix(".log")
    words = [*_flags(options, variant), *fixed, f"--run.dir={run_dir}", *flags]
    code = variant.run(words, ranks_of(options, variant), log, options.display, main=options.main)
    return Run.read(run_dir) if code == 0 else NotRun("failed", f"exit code {code}: {_message(log)}")


def measure(
    options: Options, variants: Sequence[Variant]
) -> tuple[dict[Variant, list[dict[str, Any]]], Mapping[Variant, NotRun]]:
    """Runs the variants in turns, each from a new Python; returns their results, and why some failed."""
    timed: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
    failed: dict[Variant, NotRun] = {}
    steps = options.timed_steps
    if steps <= WARM_UP_STEPS and options.repeats:
        options.display.clear()
        print_line(f"note: nothing is timed: the training has {steps} steps, of which {WARM_UP_STEPS} are warm-up")
        return timed, failed
    for repeat in range(1, options.repeats + 1):
        for n, variant in enumerate(variants, start=1):
            options.display.begin(f"engine {n}/{len(variants)}  {variant.name}  timed run {repeat}/{options.repeats}")
            with tempfile.TemporaryDirectory() as scratch:
                run_dir = Path(scratch) / "run"
                # Without CUDA graphs, which not all engines support and which would hide the cost of an engine.
                fixed = (f"--trainer.max_steps={steps}", "--run.cuda_graph=false", f"--run.dir={run_dir}")
                words = ["fit", *_flags(options, variant, "--trainer.max_steps=", "--run.cuda_graph="), *fixed]
                log = options.folder / f"{variant.folder}.log"
                code = variant.run(words, ranks_of(options, variant), log, options.display)
                if code:
                    failed[variant] = NotRun("failed", f"a timed run ended with exit code {code}: {_message(log)}")
                else:
                    timed[variant].append(json.loads((run_dir / "result.json").read_text()))
    return timed, failed


def _message(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    start = max((n for n, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 1)
    # The last line of a traceback has the error; advice on how to resume follows it.
    advice = ("There is no checkpoint", "The newest ", "The training was")
    message = [line for line in lines[start:] if not line.startswith(advice)] or ["there is no message"]
    return " ".join(dict.fromkeys(message[:: max(1, len(message) - 1)])).removeprefix("error: ")
