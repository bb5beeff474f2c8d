"""python forked_programs.py FOLDER: runs programs in forks of this process and as usual, and prints how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
        print(os.getpid(), flush=True)
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
    if "abort" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7)
"""
STARTS = {
    "script": ["program.py", "a", "b"],
    "module": ["-u", "-m", "program", "a"],
    "spawn": ["program.py", "spawn"],
    "fail": ["program.py", "fail"],
    "abort": ["program.py", "abort"],
    "optimized": ["-O", "program.py"],
    "threads": ["program.py"],
}


def run(name: str, *, forks: bool) -> dict[str, object]:
    environment = {**os.environ, "MARK": name, **({"OMP_NUM_THREADS": "3"} if name == "threads" else {})}
    if not forks:
        del environment[program_forks.SOCKET]
    words = [sys.executable, *STARTS[name]]
    done = subprocess.run(words, env=environment, input="given", capture_output=True, text=True, check=False)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def interrupted(number: int) -> dict[str, object]:
    """Starts a program, sends a signal to the process that was started, and waits until the program has ended."""
    words, environment = [sys.executable, "program.py", "wait"], {**os.environ, "MARK": ""}
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    inner = int(process.stdout.readline())
    process.send_signal(number)
    out, code = process.stdout.read(), process.wait()
    latest = time.monotonic() + 10
    while Path(f"/proc/{inner}").exists() and time.monotonic() < latest:
        time.sleep(0.05)
    return {"code": code, "out": out, "other": inner != process.pid, "ended": not Path(f"/proc/{inner}").exists()}


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
    found = {f"{name} {forks}": run(name, forks=forks) for name in STARTS for forks in (True, False)}
    print(json.dumps({**found, **{str(number): interrupted(number) for number in (signal.SIGTERM, signal.SIGKILL)}}))
