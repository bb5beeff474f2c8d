"""The command line: one parse, one check, one load of the data, and then the ranks.

python train.py --devices 2                    train, then test the best weights
python train.py fit --config configs/seed.yaml --trainer.max_epochs 1
python train.py test --ckpt runs/20260101-120000-convnet
python train.py predict --ckpt runs/20260101-120000-convnet --images my-digits/
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.distributed import DistNetworkError

from lit_mnist.addresses import choose_interface, stay_on_loopback
from lit_mnist.errors import InputError, LitMnistError, RankLostError, StoppedError
from lit_mnist.flags import read_command_line
from lit_mnist.job import Job
from lit_mnist.launch import Work, launch
from lit_mnist.offer import load_engine
from lit_mnist.prepare import Prepared, prepare
from lit_mnist.ranks import Rank, adopt_slurm, die_with_parent, launched_from_outside
from lit_mnist.record import program
from lit_mnist.situation import SITUATION, end_rank, foreseen, told_here, write_cause
from lit_mnist.spawn import spawn
from lit_mnist.stop import STOP, require_main_thread
from lit_mnist.terminal import guard_streams, print_stop
from lit_mnist.training.checkpoint_folder import newest_sound
from lit_mnist.training.run_folder import shown
from lit_mnist.work import do_job


def main(argv: list[str] | None = None, engine: str = "lightning") -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: The arguments; by default the process's own.
        engine: Name of the engine.
    """
    # The ranks are forked from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    guard_streams()
    outside, job, code = False, None, 0
    try:
        require_main_thread()
        STOP.listen()
        adopt_slurm()
        outside = launched_from_outside()
        if outside:
            die_with_parent()
        words = sys.argv[1:] if argv is None else argv
        if words[:1] == ["compare"] and engine == "lightning":
            from lit_mnist.compare.command import compare

            return compare(words[1:], command=_command(argv))
        if words[:1] == ["bench"] and engine == "lightning":
            from lit_mnist.bench.command import bench

            return bench(words[1:], command=_command(argv))
        line = read_command_line(words)
        prepared = prepare(line, engine=engine, command=_command(argv))
        job = prepared.job
        _start(prepared)
        if prepared.folder:
            prepared.folder.release()
    except LitMnistError as error:
        code = error.exit_code
        if job and prepared.folder:
            prepared.folder.release()
        if outside and code != RankLostError.exit_code and not _speaks(prepares=job is None):
            # Another says the same, and an outside launcher ends it as soon as this one has ended.
            time.sleep(1)
        else:
            _tell(error, _go_on(job, only_with_checkpoint=code == 2))
    if outside and code:
        # At once: the ranks that wait for this one are freed by its end alone.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


def _speaks(*, prepares: bool) -> bool:
    """Returns whether this rank tells an error: rank 0, and before a run, since machines may differ, one of each."""
    rank = Rank.from_environment()
    return rank.local_rank == 0 if prepares else rank.is_first


def _start(prepared: Prepared) -> None:
    """Starts the ranks: in this process where there is one or an outside launcher has started it, else as children."""
    job = prepared.job
    work = partial(do_job, job)
    run, logs = job.experiment.run, job.folder / "logs"

    if launched_from_outside():
        rank = Rank.from_environment()
        if rank.num_nodes == 1:
            stay_on_loopback()
        else:
            choose_interface()
        _work_here(work, rank, prepared, logs if rank.is_first or run.dir else None)
    elif job.plan.world_size == 1 and not run.max_restarts:
        stay_on_loopback()
        _work_here(work, Rank(), prepared, logs)
    elif run.launcher == "spawn":
        spawn(work, world_size=job.plan.world_size, logs=logs)
    else:
        launch(work, world_size=job.plan.world_size, max_restarts=run.max_restarts, logs=logs)


def _work_here(work: Work, rank: Rank, prepared: Prepared, logs: Path | None) -> None:
    """Does a rank's work in this process.

    Raises:
        LitMnistError: It ended otherwise than well; the message says how.
    """
    SITUATION.rank = rank
    if logs:
        SITUATION.open(rank, logs)

    def end(signum: signal.Signals) -> None:
        error = StoppedError(f"Stopped by {signum.name}.", signum)
        if rank.is_first:
            _tell(error, _go_on(prepared.job))
        if prepared.folder:
            prepared.folder.release()
        end_rank(error)

    STOP.listen(end)
    try:
        work(rank)
    except LitMnistError as error:
        write_cause(error)
        raise
    except DistNetworkError as error:
        write_cause(error)
        if "EADDRINUSE" not in str(error):
            raise RankLostError(told_here(error)) from error
        port = os.environ["MASTER_PORT"]
        raise InputError(f"The port {port} is taken by another program: set another MASTER_PORT.") from error
    except Exception as error:
        write_cause(error)
        if isinstance(known := foreseen(error), LitMnistError):
            raise known from error
        raise RankLostError(told_here(error)) from error


def _tell(error: LitMnistError, more: str) -> None:
    if isinstance(error, StoppedError):
        print_stop(f"{error}{more}", error.signum)
    else:
        SITUATION.print_error(f"error: {error}{more}")


def _go_on(job: Job | None, *, only_with_checkpoint: bool = False) -> str:
    """Returns how to go on after a run that ended early."""
    if job is None or not job.trains or not load_engine(job.engine).OFFER.resume:
        return ""
    damaged: list[str] = []
    found = newest_sound(job.folder, damaged.append)
    notes = "".join(f"\n{note}" for note in damaged)
    command, folder = program(job.engine), shlex.quote(shown(job.folder))
    if found is None:
        none = "\nThere is no checkpoint to go on from: --save-every 30s makes some within an epoch."
        return notes if only_with_checkpoint else notes + none
    if found.step >= job.plan.total_steps:
        return f"{notes}\nThe training was complete: test its weights with: {command} test --ckpt {folder}"
    newest = f"The newest sound checkpoint, after step {found.step}, is {shown(found.path)}"
    return f"{notes}\n{newest}; go on with: {command} --resume {folder}"


def _command(argv: list[str] | None) -> str:
    words = sys.orig_argv if argv is None else [sys.argv[0], *argv]
    return shlex.join([Path(words[0]).name, *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
