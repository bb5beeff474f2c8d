"""From a request to running ranks, and the message if they fail."""

from __future__ import annotations

import os
import shlex
import signal
from functools import partial
from pathlib import Path

import torch
from torch.distributed import DistNetworkError

from lit_mnist.checkpoint.store import find_newest_valid
from lit_mnist.cli.parser import Request
from lit_mnist.cli.prepare import Prepared, prepare
from lit_mnist.distributed.failure import convert_disk_error, exit_rank, explain_failure, report_failure
from lit_mnist.distributed.launcher import Work, launch
from lit_mnist.distributed.rank import Rank, launched_from_outside
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.rendezvous import choose_interface, use_loopback
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_failure
from lit_mnist.engines.rank_work import do_job
from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError
from lit_mnist.run.finish import program
from lit_mnist.training.job import Job


def start(request: Request, engine: str, command: str) -> None:
    """Checks and loads everything, and runs the ranks to their end.

    Args:
        request: What the command line asks for.
        engine: Name of the engine.
        command: The command as it was typed.

    Raises:
        LitMnistError: The run failed or was stopped; the message says why, and how to resume.
    """
    # The ranks are forked from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    prepared = prepare(request, engine=engine, command=command)
    try:
        _start(prepared)
    except LitMnistError as error:
        error.started = True
        error.advice = _how_to_resume(prepared.job, only_with_checkpoint=error.exit_code == InputError.exit_code)
        raise
    finally:
        if prepared.folder:
            prepared.folder.release()


def _start(prepared: Prepared) -> None:
    """Starts the ranks: in this process where there is one or an outside launcher has started it, else as children."""
    job = prepared.job
    work = partial(do_job, job)
    run, logs = job.experiment.run, job.folder / "logs"

    if launched_from_outside():
        rank = Rank.from_environment()
        if rank.num_nodes == 1:
            use_loopback()
        else:
            choose_interface()
        _work_here(work, rank, prepared, logs if rank.is_first or run.dir else None)
    elif job.plan.world_size == 1 and not run.max_restarts:
        use_loopback()
        _work_here(work, Rank(), prepared, logs)
    else:
        method = "spawn" if run.launcher == "spawn" else None
        launch(work, world_size=job.plan.world_size, max_restarts=run.max_restarts, logs=logs, start_method=method)


def _work_here(work: Work, rank: Rank, prepared: Prepared, logs: Path | None) -> None:
    """Runs one rank in this process.

    Raises:
        LitMnistError: It failed or was stopped; the message says why.
    """
    RANK_STATUS.rank = rank
    if logs:
        RANK_STATUS.open(rank, logs)

    def end(signum: signal.Signals) -> None:
        error = StoppedError(f"Stopped by {signum.name}.", signum)
        if rank.is_first:
            print_failure(error, _how_to_resume(prepared.job), RANK_STATUS.print_error)
        if prepared.folder:
            prepared.folder.release()
        exit_rank(error)

    STOP.listen(end)
    try:
        work(rank)
    except LitMnistError as error:
        report_failure(error)
        raise
    except DistNetworkError as error:
        report = report_failure(error)
        if "EADDRINUSE" not in str(error):
            raise RankLostError(explain_failure(report)) from error
        port = os.environ["MASTER_PORT"]
        raise InputError(f"The port {port} is taken by another program: set another MASTER_PORT.") from error
    except Exception as error:
        report = report_failure(error)
        if isinstance(known := convert_disk_error(error), LitMnistError):
            raise known from error
        raise RankLostError(explain_failure(report)) from error


def _how_to_resume(job: Job | None, *, only_with_checkpoint: bool = False) -> str:
    """Returns how to resume after a run that ended early."""
    if job is None or not job.trains or not job.resumable:
        return ""
    damaged: list[str] = []
    found = find_newest_valid(job.folder, damaged.append)
    notes = "".join(f"\n{note}" for note in damaged)
    command, folder = program(job.engine), shlex.quote(display_path(job.folder))
    if found is None:
        none = "\nThere is no checkpoint to resume from: --save-every 30s saves within an epoch."
        return notes if only_with_checkpoint else notes + none
    if found.step >= job.plan.total_steps:
        return f"{notes}\nThe training was complete: test its weights with: {command} test --ckpt {folder}"
    newest = f"The newest valid checkpoint, after step {found.step}, is {display_path(found.path)}"
    return f"{notes}\n{newest}; resume with: {command} --resume {folder}"
