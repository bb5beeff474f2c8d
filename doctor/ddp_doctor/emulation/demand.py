"""Whether a program needs a GPU: observed in a run without emulation."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from ddp_doctor.emulation.tensors import LIBRARY
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.run import Run
from ddp_doctor.records.spec import Spec

# Files in the folder of a run: the program asked whether there is a GPU; it tried to use one.
_ASKED, _NEEDED = "gpu-asked", "gpu-needed"
_OF_A_GPU = re.compile(r"cuda|gpu|nccl|accelerator", re.IGNORECASE)
_LAST_LINES = 4
# The doctor's own probes ask as well.
_DOCTOR = str(Path(__file__).parents[1])
_QUESTIONS = ("is_available", "device_count", "current_accelerator")


def watch(folder: Path, spec: Spec) -> None:
    """Records whether this process asks for a GPU; a run that is too small without one may end at once."""

    def ask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(2).f_code.co_filename.startswith((LIBRARY, _DOCTOR)):
            (folder / _ASKED).touch()
        return original(*args, **kwargs)

    for module in (torch.cuda, torch.accelerator):
        for name in _QUESTIONS:
            wrap(module, name, ask)

    def start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        processes = kwargs.get("nprocs", args[2] if len(args) > 2 else 1)
        if processes <= 1 and (folder / _ASKED).exists():
            # As many as there are GPUs, or one without a GPU: on a machine with GPUs, the program starts others.
            (folder / _NEEDED).touch()
            if spec.may_emulate:
                sys.stdout.flush()
                os._exit(0)
        return original(*args, **kwargs)

    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        wrap(module, "start_processes", start)
    # What each use of CUDA calls first.
    before(torch.cuda, "_lazy_init", (folder / _NEEDED).touch)


def tried_gpu(runs: Iterable[Run]) -> bool:
    """Returns whether a process of these runs tried to use a GPU."""
    return any((run.folder / _NEEDED).exists() for run in runs)


def emulation_for(spec: Spec, runs: Iterable[Run]) -> dict[str, Any]:
    """Returns the changes of a specification with which code may run that failed; empty if there are none."""
    needed = spec.may_emulate and not spec.gpus and any(map(_needs_gpu, runs))
    return {"gpus": spec.world_size} if needed else {}


def _needs_gpu(run: Run) -> bool:
    """Returns whether a run may have failed for want of a GPU, or did nothing without one."""
    if run.worked and all(rank.of_kind("step") for rank in run.ranks):
        return False
    if tried_gpu([run]):
        return True
    if run.errors:
        return any(_OF_A_GPU.search(error["message"] + _end_of(error["trace"])) for error in run.errors)
    # A program that starts as many ranks as there are GPUs, or that ends with a message.
    if not run.ranks or run.hung:
        return False
    return (run.folder / _ASKED).exists() or bool(run.lost and _OF_A_GPU.search(run.short_reason))


def _end_of(trace: str) -> str:
    """Returns the last lines of the code in a traceback; the paths may name a GPU by chance."""
    lines = [line for line in trace.splitlines() if not line.lstrip().startswith("File ")]
    return "\n".join(lines[-_LAST_LINES:])
