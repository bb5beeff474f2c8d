"""Programs that run in forks of a process that has imported torch behave as in new interpreters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compared_command import forked_and_usual
from doctor_support import CHILD_ENV

from ddp_doctor.launch.program_forks import program_of

HERE = Path(__file__).parent
SPAWN = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"
# Commands that start Pythons in different ways.
COMMANDS = {
    "torchrun": ["torchrun", "--nproc_per_node=2", "torchrun_loop.py"],
    "spawned": ["python", "spawned.py", "--world-size", "2"],
    "accelerate launch": ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "accelerate_script.py"],
    "Fabric": ["python", "fabric_loop.py"],
    "Trainer(devices=2)": ["python", "trainer.py"],
    "a shell script": ["bash", "by_hand.sh"],
}


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ([__file__, "-m"], ("script", [__file__, "-m"])),
        (["-u", "-B", "-m", "package.train", "-u"], ("module", ["package.train", "-u"])),
        (["-c", SPAWN, "--multiprocessing-fork"], ("code", [SPAWN, "--multiprocessing-fork"])),
        (["-c", "import torch"], None),
        (["-O", __file__], None),
        (["no_such_file.py"], None),
        ([], None),
    ],
)
def test_a_usual_start_of_a_program_is_known(words: list[str], program: Any) -> None:
    assert program_of(["python", *words]) == program


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


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", COMMANDS)
def test_forks_train_the_weights_of_the_usual_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE / "ways")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    usual, forked = forked_and_usual(COMMANDS[name])
    assert forked == usual
    assert all(len(weights) > 1 for weights in usual)
