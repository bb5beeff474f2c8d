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
import traceback
from functools import partial
from pathlib import Path

import torch
from torch.distributed import DistNetworkError

from lit_mnist.errors import InputError, LitMnistError, RankLostError
from lit_mnist.flags import read_command_line
from lit_mnist.job import Job
from lit_mnist.launch import launch, open_log, raise_on, report_error
from lit_mnist.offer import load_engine
from lit_mnist.prepare import Prepared, prepare
from lit_mnist.ranks import Rank, launched_from_outside, stay_on_loopback
from lit_mnist.spawn import spawn
from lit_mnist.training.checkpoint import LAST, read_checkpoint
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
    job = None
    try:
        words = sys.argv[1:] if argv is None else argv
        if words[:1] == ["compare"] and engine == "lightning":
            from lit_mnist.compare.command import compare

            return compare(words[1:], command=_command(argv))
        line = read_command_line(words)
        prepared = prepare(line, engine=engine, command=_command(argv))
        job = prepared.job
        _start(prepared)
    except LitMnistError as error:
        if launched_from_outside() and not Rank.from_environment().is_first:
            # Rank 0 alone speaks, and an outside launcher ends it as soon as another rank has ended.
            time.sleep(1)
        else:
            print(f"error: {error}{_go_on(job) if error.exit_code != InputError.exit_code else ''}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: Stopped by SIGINT before the training began.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _start(prepared: Prepared) -> None:
    """Starts the ranks: in this process where there is one or an outside launcher has started it, else as children."""
    job = prepared.job
    work = partial(do_job, job)

    if launched_from_outside():
        rank = Rank.from_environment()
        if rank.num_nodes == 1:
            stay_on_loopback()
        if rank.is_first or job.experiment.run.dir:
            open_log(job.folder / "logs", rank)
        try:
            work(rank)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            report_error(error)
            port = os.environ["MASTER_PORT"]
            raise InputError(f"The port {port} is taken by another program: set another MASTER_PORT.") from error
        except Exception as error:
            report_error(error)
            raise
    elif job.plan.world_size == 1:
        stay_on_loopback()
        open_log(job.folder / "logs", Rank())
        raise_on(signal.SIGTERM, signal.SIGINT)
        try:
            work(Rank())
        except LitMnistError:
            raise
        except Exception as error:
            raise RankLostError(f"Rank 0 failed:\n{traceback.format_exc().rstrip()}") from error
    elif job.experiment.run.launcher == "spawn":
        spawn(work, world_size=job.plan.world_size, timeout=job.experiment.run.timeout, logs=job.folder / "logs")
    else:
        launch(
            work,
            world_size=job.plan.world_size,
            timeout=job.experiment.run.timeout,
            max_restarts=job.experiment.run.max_restarts,
            logs=job.folder / "logs",
        )


def _go_on(job: Job | None) -> str:
    """Returns how to go on after a run that ended early."""
    if job is None or not job.trains or not load_engine(job.engine).OFFER.resume:
        return ""
    last = job.folder / "checkpoints" / LAST
    if not last.exists():
        return "\nNo epoch was complete, so that there is no checkpoint to go on from: --save-every N makes some."
    folder = shlex.quote(shown(job.folder))
    step = read_checkpoint(last)["global_step"]
    if step >= job.plan.total_steps:
        return f"\nThe training was complete: test its weights with: test --ckpt {folder}"
    return f"\nThe last checkpoint, after step {step}, is {shown(last)}; go on with --resume {folder}"


def _command(argv: list[str] | None) -> str:
    words = sys.orig_argv if argv is None else [sys.argv[0], *argv]
    return shlex.join([Path(words[0]).name, *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
