"""Whether a program needs a GPU: seen from how a run without emulation failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ddp_doctor.records.run import Run
from ddp_doctor.records.spec import Spec

_OF_A_GPU = re.compile(r"cuda|gpu|nccl|accelerator", re.IGNORECASE)
_LAST_LINES = 4


def emulation_for(spec: Spec, runs: Iterable[Run]) -> dict[str, Any]:
    """Returns the changes of a specification with which code may run that failed; empty if there are none."""
    needed = spec.may_emulate and not spec.gpus and any(map(_needs_gpu, runs))
    return {"gpus": spec.world_size} if needed else {}


def _needs_gpu(run: Run) -> bool:
    """Returns whether a run may have failed for want of a GPU, or did nothing without one."""
    if run.errors:
        return any(_OF_A_GPU.search(error["message"] + _end_of(error["trace"])) for error in run.errors)
    # A program that starts as many ranks as there are GPUs, or that ends with a message.
    return run.ended_early or bool(run.lost and not run.hung and _OF_A_GPU.search(run.short_reason))


def _end_of(trace: str) -> str:
    """Returns the last lines of the code in a traceback; the paths may name a GPU by chance."""
    lines = [line for line in trace.splitlines() if not line.lstrip().startswith("File ")]
    return "\n".join(lines[-_LAST_LINES:])
