"""Observes a Python process that a command has started."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_doctor.records.spec import read


def start(folder: Path) -> None:
    """Installs the probes. The record is written when the process ends, if it has taken part in a training."""
    from ddp_doctor.probes import spawned
    from ddp_doctor.probes.install import Probes

    spec = read(folder)
    spawned.install(folder, spec)
    if spec.purpose == "discover":
        return
    probes = Probes(folder, spec)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack-{os.getpid()}.txt").open("w"), all_threads=True)
    probes.install()
    owner, failed = os.getpid(), dict[str, Any]()
    show = sys.excepthook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.update(
            type=kind.__name__, message=str(error), trace="".join(traceback.format_exception(error)), input=False
        )
        show(kind, error, trace)

    def on_exit() -> None:
        # Not in the workers of a loader, and not in a launcher.
        if os.getpid() == owner and (probes.recorder.active or failed) and not _is_launcher():
            probes.loaders.close()
            probes.end(reached_end=not failed, error=failed or None)

    sys.excepthook = on_error
    atexit.register(on_exit)
    # Processes of multiprocessing end without atexit, and print their exceptions themselves.
    from multiprocessing import util

    util.Finalize(None, on_exit, exitpriority=100)


def _is_launcher() -> bool:
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name in {"torchrun", "accelerate"} or "torch.distributed.run" in sys.orig_argv
