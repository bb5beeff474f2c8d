"""Observes a Python process that a command has started, or finds out how many processes a program starts."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import is_called_by_user
from ddp_doctor.records.spec import Spec, read

# The file with the number of processes that a program starts by torch.multiprocessing, in the folder of the run.
FOUND = "spawned.json"


def start(folder: Path) -> None:
    """Installs the probes. The record is written when the process ends, if it has taken part in training."""
    spec = read(folder)
    if devices := spec.interventions.get("devices"):
        wrap(torch.cuda, "device_count", lambda original: int(devices) if is_called_by_user() else original())
    if spec.purpose == "discover":
        _stop_at_spawn(folder)
    else:
        _observe(folder, spec)


def _stop_at_spawn(folder: Path) -> None:
    def stop(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        processes = kwargs.get("nprocs", args[2] if len(args) > 2 else 1)
        (folder / FOUND).write_text(json.dumps(int(processes)))
        os._exit(0)

    for name in ("spawn", "start_processes"):
        wrap(torch.multiprocessing, name, stop)
    # It trains in this process: there is nothing to find.
    wrap(DataLoader, "__iter__", lambda *_: os._exit(0))


def _observe(folder: Path, spec: Spec) -> None:
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack-{os.getpid()}.txt").open("w"), all_threads=True)
    probes.install()
    owner, failed, show = os.getpid(), dict[str, Any](), sys.excepthook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.update(
            type=kind.__name__, message=str(error), trace="".join(traceback.format_exception(error)), input=False
        )
        show(kind, error, trace)

    def on_exit() -> None:
        # Not in the workers of a loader, and not in a launcher.
        name = Path(sys.argv[0]).name if sys.argv else ""
        launches = name in {"torchrun", "accelerate"} or "torch.distributed.run" in sys.orig_argv
        if os.getpid() == owner and (probes.recorder.active or failed) and not launches:
            probes.loaders.close()
            probes.end(reached_end=not failed, error=failed or None)

    sys.excepthook = on_error
    atexit.register(on_exit)
    # Processes of multiprocessing end without atexit, and print their exceptions themselves.
    from multiprocessing import util

    util.Finalize(None, on_exit, exitpriority=100)
