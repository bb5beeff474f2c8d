"""A process per rank that has imported the libraries, and forks the runs: `python -m ddp_doctor.launch.fork_server`.

Each rank has its own interpreter, with another PYTHONHASHSEED, as separately started ranks have. The user's code
is imported in the fork, so each run starts afresh. The requests and answers are lines of JSON on the standard streams.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.files.view_process import ViewProcess
from ddp_doctor.launch import program_forks
from ddp_doctor.launch.rank import run_rank
from ddp_doctor.processes import become_subreaper, die_with_parent, kill_children, living_children
from ddp_doctor.records.spec import FOLDER, read

_SITE = Path(__file__).with_name("site")
# On a busy machine, the record of a rank takes seconds.
_SECONDS_TO_RECORD = 20.0


def main() -> None:
    """Answers requests until the input ends."""
    die_with_parent()
    become_subreaper()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    views = ViewProcess()
    for line in sys.stdin:
        request = json.loads(line)
        for name in request.get("preload", ()):
            with suppress(Exception):
                importlib.import_module(name)
        if "view" in request:
            answers.write(json.dumps(views.make(*map(Path, request["view"]))) + "\n")
        elif "folder" in request:
            _run(request, answers)
        else:
            answers.write(json.dumps({"ready": True}) + "\n")


def _run(request: dict[str, Any], answers: Any) -> None:
    gc.collect()
    gc.freeze()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            answers.close()
            code = _child(request)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    answers.write(json.dumps({"pid": child}) + "\n")
    _, status = os.waitpid(child, 0)
    if not status and request["command"]:
        _wait_for_records(Path(request["folder"]))
    kill_children()
    answers.write(json.dumps({"code": os.waitstatus_to_exitcode(status)}) + "\n")


def _wait_for_records(folder: Path) -> None:
    """Waits for the ranks that a command leaves behind: Lightning's rank 0 ends without waiting for the others."""
    files = [folder / f"done{rank}" for rank in range(read(folder).world_size)]
    latest = time.monotonic() + _SECONDS_TO_RECORD
    while time.monotonic() < latest and living_children() and not all(file.exists() for file in files):
        time.sleep(0.05)


def _child(request: dict[str, Any]) -> int:
    die_with_parent()
    os.setsid()
    folder = Path(request["folder"])
    os.environ.update({name: value for name, value in request["environment"].items() if value})
    for name in [name for name, value in request["environment"].items() if not value]:
        os.environ.pop(name, None)
    tempfile.tempdir = None
    command = request["command"]
    if command:
        # Interpreters that it starts install the probes.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    if request.get("namespaces"):
        private_view.enter(request["namespaces"], str(Path.cwd()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    name = "output.txt" if command else f"output{os.environ['RANK']}.txt"
    output = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if request.get("copy"):
        command = folder_copy.enter(Path(request["copy"]), command)
    if command:
        if read(folder).purpose != "bare":
            os.environ[FOLDER] = str(folder)
            if request["forks"]:
                program_forks.start(folder)
        os.execvp(command[0], command)  # noqa: S606
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = [sys.argv[0]]
    return run_rank(folder, read(folder))


if __name__ == "__main__":
    main()
