"""Whether code that fails under the doctor runs without it, which is then a defect of the doctor."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import DEFECT

_TEXT = f"{DEFECT}: this is a defect of the doctor, not a fault of the program. Please report it with these lines:\n"
# Longer than the failed run, the program has come past the place.
_SECONDS_MORE = 10.0
_TIMED_OUT = "timed out"


def defect_of_the_doctor(evidence: Evidence) -> str:
    """Returns a sentence that says so if the code runs alone where it failed under the doctor; empty otherwise."""
    failed = evidence.failed("ranks", "single")
    spec = evidence.spec
    module = bool(spec.target.config or (evidence.single and evidence.is_module))
    if failed is None or failed.hung or module or spec.gpus or (spec.target.data and not spec.target.command):
        # What hangs alone would hang here, and a module or a program for GPUs needs the doctor to run at all.
        return ""
    if failed.errors and failed.errors[0]["input"]:
        return ""
    seconds = min(spec.timeout, failed.seconds + _SECONDS_MORE)
    run = evidence.run("without the doctor", purpose="bare", world_size=failed.spec.world_size, timeout=seconds)
    # Under the doctor, a rank waits for a shorter time: what waits for ever also hangs alone.
    waited = any(_TIMED_OUT in error["message"].lower() for error in failed.errors)
    runs = (run.hung and not waited) or (bool(run.ranks) and all(rank.code == 0 for rank in run.ranks))
    return _TEXT if runs else ""
