"""The steps of a run: validate, load, plan, claim the folder, launch the ranks.

Each step is entered once, in this order, for the project's experiment and for a user's classes alike. Every check comes
before the first write, so that a rejected request costs one message and changes nothing.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import torch

from lit_mnist.checkpoint.store import find_newest_valid
from lit_mnist.cli.claim import claim
from lit_mnist.cli.launch import Ranks, run_ranks
from lit_mnist.cli.request import Request
from lit_mnist.cli.resume import checkpoint_to_read, lock_resumed_folder
from lit_mnist.cli.target import Target
from lit_mnist.cli.validate import check_accelerate
from lit_mnist.distributed.rank import print_once
from lit_mnist.distributed.screen import labelled
from lit_mnist.distributed.terminal import display_path
from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.run.finish import program


def run(request: Request, engine: str, command_line: str) -> None:
    """Runs a request to its end.

    Args:
        request: The parsed request.
        engine: Name of the engine.
        command_line: The command as it was typed.

    Raises:
        LitMnistError: The request is rejected, or the run failed or was stopped.
    """
    # The ranks are forked from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    check_accelerate()
    target = _target(request, engine, command_line)
    with lock_resumed_folder(request) as lock:
        target.validate()
        target.load()
        target.plan()
        path, folder = claim(request, target.saved, target.output(), lock)
    work = target.work(path, checkpoint_to_read(request, target.saved, folder))
    print_once(labelled("running", _describe(target)))
    run_ranks(Ranks(work, target.world_size, target.run, path, partial(_how_to_resume, target, path)), folder)


def _target(request: Request, engine: str, command_line: str) -> Target:
    """Returns what the request names. Each is imported only by its own runs."""
    if request.classes:
        from lit_mnist.cli.user_target import UserTarget

        return UserTarget(request, engine, command_line)
    from lit_mnist.cli.experiment_target import ExperimentTarget

    return ExperimentTarget(request, engine, command_line)


def _describe(target: Target) -> str:
    """Returns what begins: the command, what it trains or evaluates, the steps and the ranks."""
    kind = "GPU" if target.devices.kind == "cuda" else "CPU"
    ranks = f"{target.world_size} rank{'s' * (target.world_size != 1)} ({kind})"
    count = target.total_steps if target.request.trains else None
    steps = "" if count is None else f", {count} step{'s' * (count != 1)}"
    return f"{target.request.command}: {target.describe()}{steps}, {ranks}"


def _how_to_resume(target: Target, path: Path, only_with_checkpoint: bool) -> str:
    """Returns the advice below the message of a run that has failed or was stopped."""
    request = target.request
    if not request.trains or not CAPABILITIES[target.engine].resume:
        return ""
    damaged: list[str] = []
    found = find_newest_valid(path, damaged.append)
    notes = "".join(f"\n{note}" for note in damaged)
    if found is None:
        none = "\nThere is no checkpoint to resume from: --save-every 30s saves within an epoch."
        return notes if only_with_checkpoint else notes + none
    imports = f" --import {','.join(request.imports)}" if request.imports else ""
    command, folder = program(target.engine), shlex.quote(display_path(path)) + imports
    if target.total_steps is not None and found.step >= target.total_steps:
        return f"{notes}\nThe training was complete: test its weights with: {command} test --ckpt {folder}"
    newest = f"The newest valid checkpoint, after step {found.step}, is {display_path(found.path)}"
    fit = " fit" if request.command == "fit" else ""
    return f"{notes}\n{newest}; resume with: {command}{fit} --resume {folder}"
