"""Finds out how many processes a program starts by torch.multiprocessing, and stands in for the GPUs that it counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import is_called_by_user
from ddp_doctor.records.spec import Spec

# The file with the number of processes, in the folder of the run.
FOUND = "spawned.json"


def install(folder: Path, spec: Spec) -> None:
    """Installs what the run of a command needs to change or to find its number of processes."""
    if devices := spec.interventions.get("devices"):
        wrap(torch.cuda, "device_count", lambda original: int(devices) if is_called_by_user() else original())
    if spec.purpose == "discover":

        def stop(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            processes = kwargs.get("nprocs", args[2] if len(args) > 2 else 1)
            (folder / FOUND).write_text(json.dumps(int(processes)))
            os._exit(0)

        for name in ("spawn", "start_processes"):
            wrap(torch.multiprocessing, name, stop)
        # It trains in this process: there is nothing to find.
        wrap(DataLoader, "__iter__", lambda *_: os._exit(0))
