"""python forked_programs.py FOLDER: runs programs in forks of this process, and prints how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ddp_doctor
from ddp_doctor.launch import program_forks, starters  # noqa: F401
from ddp_doctor.launch.proxy import SOCKET
from ddp_doctor.probes import install  # noqa: F401
from ddp_doctor.records.spec import FOLDER, Spec, Target

# The first line tells a fork, which has NumPy from the start.
PROGRAM = """
import sys
forked = "numpy" in sys.modules and "torch" not in sys.modules
import atexit, json, multiprocessing, os, signal, time
import helper
atexit.register(print, "at exit")

def double(queue):
    queue.put(os.environ["MARK"] * 2)

def on_signal(number, _):
    print("signal", number)
    sys.exit(5)

if __name__ == "__main__":
    facts = [sys.argv, __file__, sys.path[0], os.getcwd(), os.environ["MARK"], sys.orig_argv[1:]]
    print(json.dumps([forked, *facts]))
    print(sys.stdin.read(), file=sys.stderr)
    if "spawn" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=double, args=(queue,))
        process.start()
        print(queue.get(), process.join(), process.exitcode)
    if "wait" in sys.argv:
        signal.signal(signal.SIGTERM, on_signal)
        print(os.getpid(), flush=True)
        time.sleep(60)
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


def run(name: str, words: list[str], folder: Path, *, forks: bool) -> dict[str, object]:
    environment = {**os.environ, "MARK": name, **({"OMP_NUM_THREADS": "3"} if name == "threads" else {})}
    if not forks:
        del environment[SOCKET]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        input="given",
        capture_output=True,
        text=True,
        check=False,
    )
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def interrupted(number: int, folder: Path) -> dict[str, object]:
    """Starts a program, sends a signal to the process that was started, and waits until the program has ended."""
    words = [sys.executable, "program.py", "wait"]
    process = subprocess.Popen(
        words, cwd=folder, env={**os.environ, "MARK": ""}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    inner = int(process.stdout.readline())
    process.send_signal(number)
    out, code = process.stdout.read(), process.wait()
    latest = time.monotonic() + 10
    while Path(f"/proc/{inner}").exists() and time.monotonic() < latest:
        time.sleep(0.05)
    return {"code": code, "out": out, "other": inner != process.pid, "ended": not Path(f"/proc/{inner}").exists()}


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "program.py").write_text(PROGRAM)
    (folder / "helper.py").touch()
    (folder / "run").mkdir()
    Spec(Target(command=("x",))).write(folder / "run")
    os.environ[FOLDER] = str(folder / "run")
    site = Path(ddp_doctor.__file__).parent / "launch" / "site"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    program_forks.start(folder / "run")
    found = {
        f"{name} {'forked' if forks else 'usual'}": run(name, words, folder, forks=forks)
        for name, words in STARTS.items()
        for forks in (True, False)
    }
    found |= {"SIGTERM": interrupted(signal.SIGTERM, folder), "SIGKILL": interrupted(signal.SIGKILL, folder)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
