"""Observes a Python process that a command has started."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_doctor.launch.gpus import emulate, watch
from ddp_doctor.launch.starters import Starters
from ddp_doctor.records.spec import Spec, read

# Programs that start ranks as other processes, and so never train themselves.
_LAUNCHERS = {"torchrun", "accelerate"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def start(folder: Path) -> None:
    """Installs the probes. The record is written when the process ends, if it has taken part in training."""
    spec = read(folder)
    emulate(spec)
    Starters(spec.world_size).install()
    # The numbers of processes are those that the program itself names.
    watch(folder, spec)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack-{os.getpid()}.txt").open("w"), all_threads=True)
    # In a launcher, the probes would see nothing, and their imports take time.
    if not is_launcher(sys.orig_argv):
        _observe(folder, spec)


def is_launcher(words: Sequence[str]) -> bool:
    """Returns whether a Python that was started with these words only starts ranks as other processes."""
    if "--multiprocessing-fork" in words:
        return False
    program = next((place for place, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
    if words[program - 1] == "-m":
        return words[program] in _LAUNCHER_MODULES
    return program > 0 and Path(words[program]).name in _LAUNCHERS


def _observe(folder: Path, spec: Spec) -> None:
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
    probes.install()
    owners, failed, show = {os.getpid()}, dict[str, Any](), sys.excepthook
    ended: set[int] = set()

    def keep(error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        failed.update(type=type(error).__name__, message=str(error), trace=trace, input=False)

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        keep(error)
        show(kind, error, trace)

    def on_exit() -> None:
        # Not in the workers of a loader, and once, although both functions below call it in most processes.
        if os.getpid() in owners - ended and (probes.recorder.active or failed):
            ended.add(os.getpid())
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
