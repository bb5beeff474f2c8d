"""One rank of a run: installs the probes, runs the target, and writes the record."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from ddp_doctor.records.spec import Spec


def run_rank(folder: Path, spec: Spec) -> int:
    """Runs a target in this process, whose environment names its rank; returns an exit code."""
    rank = int(os.environ["RANK"])
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack{rank}.txt").open("w"), all_threads=True)
    from ddp_doctor.errors import InputError
    from ddp_doctor.launch.targets import run_target
    from ddp_doctor.probes.install import Probes

    probes = Probes(folder, spec)
    sys.path.insert(0, str(Path.cwd()))
    try:
        probes.install()
        run_target(spec, rank, probes)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in {None, 0}:
            probes.loaders.close()
            probes.end(reached_end=True)
            return 0
        wrong = isinstance(error, InputError)
        probes.end(
            reached_end=False,
            error={
                "type": type(error).__name__,
                "message": str(error),
                "trace": "" if wrong else _user_trace(error),
                "input": wrong,
            },
        )
        return 2 if wrong else 1
    probes.loaders.close()
    probes.end(reached_end=True)
    return 0


def _user_trace(error: BaseException) -> str:
    """Returns the traceback without the frames of the doctor."""
    here = str(Path(__file__).parents[1])
    found = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = found
    while part is not None:
        kept = [frame for frame in part.stack if not frame.filename.startswith((here, "<frozen importlib"))]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(found.format())
