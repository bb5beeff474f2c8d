"""Launches the ranks of a run, in this process or by torch's elastic agent, and releases the run folder at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistNetworkError

from lit_mnist.cli.entry import finish_imports
from lit_mnist.distributed.failure import convert_disk_error, exit_rank, explain_failure, report_failure
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank, launched_from_outside
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.rendezvous import choose_interface, use_loopback
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import print_failure
from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError
from lit_mnist.run.folder import RunFolder
from lit_mnist.run.settings import RunSettings


@dataclass(frozen=True)
class Ranks:
    """What `run_ranks` starts.

    Attributes:
        work: The work of each rank.
        world_size: Number of ranks over all machines.
        run: The section `run`.
        path: Path of the run folder.
        advice: Returns how to resume; its argument says whether only a checkpoint is worth a message.
    """

    work: Callable[[Rank], None]
    world_size: int
    run: RunSettings
    path: Path
    advice: Callable[[bool], str]


def run_ranks(ranks: Ranks, folder: RunFolder | None) -> None:
    """Runs the ranks to their end, and releases the run folder.

    Raises:
        LitMnistError: The run failed or was stopped; the message says why, and how to resume.
    """
    saved = folder.saved() if folder else {}
    try:
        _run_ranks(ranks, folder)
    except LitMnistError as error:
        error.started = True
        if folder and isinstance(error, InputError) and not error.step and folder.saved() == saved:
            # The ranks have rejected the request, such as its checkpoint.
            folder.undo()
        error.advice = ranks.advice(error.exit_code == InputError.exit_code)
        raise
    finally:
        if folder:
            folder.release()


def _run_ranks(ranks: Ranks, folder: RunFolder | None) -> None:
    """Runs one rank in this process if it is the only one or an outside launcher started it; else launches them."""
    run, logs = ranks.run, ranks.path / "logs"
    frozen = finish_imports()
    if launched_from_outside():
        rank = Rank.from_environment()
        if rank.num_nodes == 1:
            use_loopback()
        else:
            choose_interface()
        _run_rank(ranks, folder, rank, logs if rank.is_first or run.dir else None)
    elif ranks.world_size == 1 and not run.max_restarts:
        use_loopback()
        _run_rank(ranks, folder, Rank(), logs)
    else:
        method = "spawn" if run.launcher == "spawn" else None
        launch(
            ranks.work,
            world_size=ranks.world_size,
            max_restarts=run.max_restarts,
            logs=logs,
            start_method=method,
            frozen=frozen,
        )


def _run_rank(ranks: Ranks, folder: RunFolder | None, rank: Rank, logs: Path | None) -> None:
    """Runs one rank in this process, and turns its exceptions into errors with a message."""
    RANK_STATUS.rank = rank
    if logs:
        RANK_STATUS.open(rank, logs)

    def end(signum: signal.Signals) -> None:
        error = StoppedError(f"Stopped by {signum.name}.", signum)
        if rank.is_first:
            print_failure(error, ranks.advice(False), RANK_STATUS.print_error)
        if folder:
            folder.release()
        exit_rank(error)

    STOP.listen(end)
    try:
        ranks.work(rank)
    except LitMnistError as error:
        error.step = RANK_STATUS.step
        report_failure(error)
        raise
    except DistNetworkError as error:
        report = report_failure(error)
        if "EADDRINUSE" not in str(error):
            raise RankLostError(explain_failure(report)) from error
        port = os.environ["MASTER_PORT"]
        raise InputError(f"The port {port} is in use by another program: set another MASTER_PORT.") from error
    except Exception as error:
        report = report_failure(error)
        if isinstance(known := convert_disk_error(error), LitMnistError):
            known.step = RANK_STATUS.step
            raise known from error
        raise RankLostError(explain_failure(report)) from error
