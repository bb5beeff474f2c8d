"""Observes a Python process that a command has started."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_doctor.launch.gpus import emulate, watch
from ddp_doctor.launch.starters import Starters
from ddp_doctor.records.spec import Spec, read


def start(folder: Path) -> None:
    """Installs the probes. The record is written when the process ends, if it has taken part in training."""
    spec = read(folder)
    emulate(spec)
    Starters(spec.world_size).install()
    # The numbers of processes are those that the program itself names.
    watch(folder, spec)
    _observe(folder, spec)


def _observe(folder: Path, spec: Spec) -> None:
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack-{os.getpid()}.txt").open("w"), all_threads=True)
    probes.install()
    owners, failed, show = {os.getpid()}, dict[str, Any](), sys.excepthook

    def keep(error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        failed.update(type=type(error).__name__, message=str(error), trace=trace, input=False)

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        keep(error)
        show(kind, error, trace)

    def on_exit() -> None:
        # Not in the workers of a loader, and not in a launcher.
        name = Path(sys.argv[0]).name if sys.argv else ""
        launches = name in {"torchrun", "accelerate"} or "torch.distributed.run" in sys.orig_argv
        if os.getpid() in owners and (probes.recorder.active or failed) and not launches:
            # A process of multiprocessing ends with the exception of its function, or exits because of it.
            error = sys.exception() if not failed else None
            if isinstance(error, SystemExit):
                error = error.__context__ if error.code else None
            if error is not None:
                keep(error)
            probes.loaders.close()
            probes.end(reached_end=not failed, error=failed or None)

    sys.excepthook = on_error
    atexit.register(on_exit)
    # Processes of multiprocessing end without atexit, and print their exceptions themselves.
    util.Finalize(None, on_exit, exitpriority=100)

    def after_fork(_: Any) -> None:
        if not probes.recorder.active:
            # A rank, or the worker of a loader, which will record nothing.
            owners.add(os.getpid())
            util.Finalize(None, on_exit, exitpriority=100)
            probes.watch()

    util.register_after_fork(probes, after_fork)
