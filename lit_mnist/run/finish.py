"""The end of a job: rank 0 writes the result and the report, and prints a summary."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.terminal import display_path, print_labelled, print_line
from lit_mnist.run.folder import REPORT, RESULT, RunFolder
from lit_mnist.run.job import Job
from lit_mnist.run.outcome import Outcome, Trained
from lit_mnist.run.result import build_result, total_gpu_memory, total_memory


def finish(job: Job, rank: Rank, outcome: Outcome) -> None:
    """Writes the result and the report, and prints the summary; every rank must call it."""
    end_tracker()
    device = job.devices.of(rank)
    memory = total_memory(outcome.clock, rank, device, job.first_process)
    # nn.DataParallel is one rank on several GPUs.
    gpus = job.devices.numbers if job.devices.count > rank.local_world_size else [device]
    gpu_memory = total_gpu_memory(rank, device, gpus)
    if not rank.is_first or job.command == "predict":
        return
    result = build_result(
        job, world_size=rank.world_size, device=device, memory=memory, gpu_memory=gpu_memory, outcome=outcome
    )
    RunFolder(job.folder).write_result(result)
    if job.report:
        job.report(job, result, outcome)
    _summarize(job, rank, outcome)


def end_tracker() -> None:
    """Ends the run of Weights & Biases in this process, if there is one.

    `WandbLogger` leaves this to an exit function, which a forked rank does not run: its metrics would be lost.
    """
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()


def _summarize(job: Job, rank: Rank, outcome: Outcome) -> None:
    trained = outcome.trained
    print_line()
    if trained:
        _summarize_training(job, rank, trained)
    for title, metrics in (("validated", outcome.validation if not outcome.test else None), ("tested", outcome.test)):
        if metrics:
            print_labelled(title, describe_metrics(metrics))
    for reason in outcome.inexact:
        print_line(f"note: not exact, these metrics depend on the number of ranks: {reason}")
    print_labelled("results", f"{display_path(job.folder / RESULT)}, {display_path(job.folder / REPORT)}")
    for label, command in _next_commands(job, outcome):
        print_labelled(label, command)


def _next_commands(job: Job, outcome: Outcome) -> list[tuple[str, str]]:
    """Returns the commands that can follow, each after its label."""
    found = []
    if outcome.trained:
        folder, command, steps = _quoted(job.folder) + job.import_flag, program(job.engine), outcome.trained.steps
        if job.resumable and job.can_continue(steps):
            unlimited = "" if (job.config["trainer"].get("max_steps") or -1) == -1 else " --max-steps -1"
            epochs = outcome.trained.epochs + 1
            found.append(("continue", f"{command} fit --resume {folder} --epochs {epochs}{unlimited}"))
        if "test" in outcome.evaluations:
            found.append(("test", f"{command if job.testable else program()} test --ckpt {folder}"))
    elif following := next((name for name in outcome.evaluations if name != job.command), None):
        found.append((following, evaluate_with(job, following)))
    return found or [("open", f"python -m webbrowser {_quoted(job.folder / REPORT)}")]


def _summarize_training(job: Job, rank: Rank, trained: Trained) -> None:
    ranks = f"{rank.world_size} rank{'s' * (rank.world_size != 1)}"
    skipped = f", {trained.skipped_steps} skipped by the GradScaler" if trained.skipped_steps else ""
    steps = f"{trained.steps_now} step{'s' * (trained.steps_now != 1)}"
    before = trained.steps - trained.steps_now
    since = f" since the resume after step {before}" if before else ""
    print_labelled("trained", f"{steps} on {ranks}, {job.precision}, in {trained.seconds:.1f} s{since}{skipped}")
    if trained.stopped_early:
        print_line(f"stopped early: {trained.stopped_early}")


def evaluate_with(job: Job, command: str) -> str:
    """Returns the command that continues with the checkpoint of an evaluation."""
    assert job.checkpoint
    place = job.checkpoint.parent.parent if job.checkpoint.parent.name == "checkpoints" else job.checkpoint
    return f"{program(job.engine)} {command} --ckpt {_quoted(place)}{job.import_flag}"


def _quoted(path: Path) -> str:
    return shlex.quote(display_path(path))


def describe_metrics(metrics: Mapping[str, Any]) -> str:
    """Returns the metrics of an evaluation in one line: with the number of correct predictions, if it is known."""
    if "confusion" in metrics:
        right = sum(row[number] for number, row in enumerate(metrics["confusion"]))
        return f"{metrics['accuracy']:.2%} ({right} of {metrics['count']}), loss {metrics['loss']:.4f}"
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if math.isfinite(value))


def program(engine: str = "lightning") -> str:
    """Returns the command that starts an engine."""
    if engine != "lightning":
        return f"python -m lit_mnist.engines.{engine}"
    script = Path(sys.argv[0])
    return f"python {shlex.quote(sys.argv[0])}" if script.name == "train.py" else "lit-mnist"
