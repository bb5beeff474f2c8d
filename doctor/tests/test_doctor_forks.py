"""Programs that run in forks of a process that has imported torch behave as in new interpreters.

`python test_doctor_forks.py FOLDER` runs them in forks of itself and as usual, and prints how they end.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddp_doctor
from ddp_doctor.launch import program_forks, starters  # noqa: F401
from ddp_doctor.probes import install  # noqa: F401
from ddp_doctor.records.spec import FOLDER, Spec, Target

# The first word tells a fork, which has NumPy from the start.
PROGRAM = """
import sys
forked = "numpy" in sys.modules
import atexit, json, multiprocessing, os, signal, time
import helper
atexit.register(print, "at exit")

def double(queue):
    queue.put(os.environ["MARK"] * 2)

def on_signal(number, _):
    print("signal", number)
    sys.exit(5)

if __name__ == "__main__":
    print(json.dumps([forked, sys.argv, __file__, sys.path[0], os.getcwd(), os.environ["MARK"], sys.orig_argv[1:]]))
    if "wait" in sys.argv:
        signal.signal(signal.SIGTERM, on_signal)
        print("ready", flush=True)
        time.sleep(60)
    print(sys.stdin.read(), file=sys.stderr)
    if "spawn" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=double, args=(queue,))
        process.start()
        print(queue.get(), process.join(), process.exitcode)
    if "fail" in sys.argv:
        raise ValueError("wrong")
    sys.exit(7)
"""
STARTS = {
    "module": ["-u", "-m", "program", "a"],
    "spawn": ["program.py", "spawn"],
    "fail": ["program.py", "fail"],
    "threads": ["program.py"],
    "signal": ["program.py", "wait"],
}


def run(name: str, *, forks: bool) -> dict[str, Any]:
    """Runs a program, which gets a signal as soon as it waits for one."""
    environment = {**os.environ, "MARK": name, **({"OMP_NUM_THREADS": "3"} if name == "threads" else {})}
    if not forks:
        del environment[program_forks.SOCKET]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, *STARTS[name]], env=environment, text=True, **pipes)
    first = ""
    if name == "signal":
        first = process.stdout.readline()  # type: ignore[union-attr]
        assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate("given")
    return {"code": process.returncode, "out": first + out, "err": err}


@pytest.mark.slow
def test_a_forked_program_behaves_as_a_new_interpreter(tmp_path: Path) -> None:
    # As in the doctor's interpreters, libraries start no threads, and the streams have no buffers.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(Path(ddp_doctor.__file__).parents[1])
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    for name, (forked, usual) in json.loads(done.stdout).items():
        assert forked["out"].replace("true", "false", 1) == usual["out"]
        # A traceback has other frames.
        assert forked["err"].splitlines()[-1:] == usual["err"].splitlines()[-1:]
        assert forked["code"] == usual["code"] == {"fail": 1, "signal": 5}.get(name, 7)
        # Variables that libraries read when they are imported need a new interpreter.
        assert ("true" in forked["out"]) == (name != "threads")


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    Path("program.py").write_text(PROGRAM)
    Path("helper.py").touch()
    folder = Path("run").absolute()
    folder.mkdir()
    Spec(Target(command=("x",))).write(folder)
    site = Path(ddp_doctor.__file__).parent / "launch" / "site"
    os.environ |= {FOLDER: str(folder), "PYTHONPATH": f"{site}:{os.environ['PYTHONPATH']}"}
    program_forks.start(folder)
    print(json.dumps({name: [run(name, forks=forks) for forks in (True, False)] for name in STARTS}))
