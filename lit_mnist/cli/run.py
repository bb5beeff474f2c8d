"""The steps of a run: validate, load, plan, claim the folder, launch the ranks.

Each step is entered once, in this order, for the project's experiment and for a user's classes alike. Every check comes
before the first write, so that a rejected request costs one message and changes nothing.
"""

from __future__ import annotations

import torch

from lit_mnist.cli.launch import run_ranks
from lit_mnist.cli.request import Request
from lit_mnist.cli.target import Target
from lit_mnist.cli.validate import check_accelerate


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
    with target.lock() as lock:
        target.validate()
        target.load()
        target.plan()
        folder = target.claim(lock)
    run_ranks(target.ranks(folder), folder)


def _target(request: Request, engine: str, command_line: str) -> Target:
    """Returns what the request names. Only a user's classes need Lightning before the engine is imported."""
    if request.classes:
        from lit_mnist.cli.user_target import UserTarget

        return UserTarget(request, engine, command_line)
    from lit_mnist.cli.experiment_target import ExperimentTarget

    return ExperimentTarget(request, engine, command_line)
