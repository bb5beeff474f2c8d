"""Programs that run in forks of a process that has imported torch behave as in new interpreters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV

HERE = Path(__file__).parent


@pytest.mark.timeout(300)
def test_a_forked_program_behaves_as_a_new_interpreter(tmp_path: Path) -> None:
    driver = [sys.executable, str(HERE / "forked_programs.py"), str(tmp_path)]
    # As in the doctor's interpreters, libraries start no threads, and the streams have no buffers.
    environment = CHILD_ENV | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(driver, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("script", "module", "spawn", "fail", "abort", "optimized", "threads"):
        forked, usual = (found[f"{name} {forks}"] for forks in (True, False))
        assert forked["out"].replace("true", "false", 1) == usual["out"]
        # A traceback has other frames.
        assert forked["err"].splitlines()[-1:] == usual["err"].splitlines()[-1:]
        assert forked["code"] == usual["code"] == {"fail": 1, "abort": -signal.SIGKILL}.get(name, 7)
        # Unusual flags, and variables that libraries read when they are imported, need a new interpreter.
        assert ("true" in forked["out"]) == (name not in {"optimized", "threads"})
    assert found["15"] == {"code": 5, "out": f"signal {signal.SIGTERM:d}\nat exit\n", "other": True, "ended": True}
    assert found["9"] == {"code": -signal.SIGKILL, "out": "", "other": True, "ended": True}
