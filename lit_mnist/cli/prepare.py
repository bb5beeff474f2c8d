"""From a parsed request to a job that is ready to start: validate, load, plan, claim.

Nothing is written before everything is checked, so that a wrong input costs one message and no process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.format import LAST
from lit_mnist.cli.claim import claim, locked_to_resume
from lit_mnist.cli.load import Loaded, load
from lit_mnist.cli.parser import Request
from lit_mnist.cli.plan import Planned, plan
from lit_mnist.cli.validate import Validated, validate
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.engines.capabilities import CAPABILITIES, load_engine
from lit_mnist.run.folder import RunFolder
from lit_mnist.training.job import Job
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
    """Enters each step once.

    Args:
        request: The parsed request.
        engine: Name of the engine.
        command: The command as it was typed.

    Raises:
        InputError: Something is wrong; nothing was written.
    """
    # The ranks are forked from this process and inherit the import.
    load_engine(engine)
    with locked_to_resume(request) as lock:
        validated = validate(request, engine)
        loaded = load(validated)
        planned = plan(validated, loaded)
        path, folder = claim(validated, planned.plan, lock)
    return Prepared(_job(validated, loaded, planned, path, folder, command), folder)


def _job(
    validated: Validated, loaded: Loaded, planned: Planned, path: Path, folder: RunFolder | None, command: str
) -> Job:
    request, capabilities = validated.request, CAPABILITIES[validated.engine]
    return Job(
        command=request.command,
        engine=validated.engine,
        experiment=validated.experiment,
        dataset=loaded.dataset,
        splits=loaded.splits,
        plan=planned.plan,
        devices=planned.devices,
        precision=resolve_precision(validated.experiment.trainer.precision, planned.devices.kind),
        threads=planned.threads,
        folder=path,
        command_line=command,
        first_process=os.getppid() if launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
        checkpoint=_checkpoint(validated, folder),
        weights=loaded.weights,
        files=loaded.files,
        extras=_trainer_options(request) if request.extras.names else None,
        stated=validated.stated,
        cuda_graph=validated.cuda_graph,
        resumable=capabilities.resume,
        testable="test" in capabilities.commands,
    )


def _checkpoint(validated: Validated, folder: RunFolder | None) -> Path | None:
    """Returns the checkpoint that the ranks read: a copy of another run's, which may change."""
    saved = validated.saved
    if saved is None:
        return None
    if not validated.request.trains or folder is None or launched_from_outside() or saved.is_in(folder.checkpoints):
        return saved.path
    return folder.checkpoints / LAST


def _trainer_options(request: Request) -> Callable[[], dict[str, Any]]:
    """Returns what makes the further options of Lightning's Trainer in each rank."""
    from lit_mnist.cli.lightning_cli import make_trainer_options

    return partial(make_trainer_options, request.extras.names, request.extras.words)
