"""A process per rank that has imported the libraries, and forks the runs: `python -m ddp_doctor.launch.fork_server`.

Each rank has its own interpreter, with another PYTHONHASHSEED, as separately started ranks have. The user's code
is imported in the fork, so each run starts afresh. The requests and answers come through a connection.
"""

import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.launch import program_forks
from ddp_doctor.launch.rank import run_rank
from ddp_doctor.processes import become_subreaper, children_of, die_with_parent, kill_children
from ddp_doctor.records.spec import FOLDER, read

_SITE = Path(__file__).with_name("site")
# On a busy machine, the record of a rank takes seconds.
_SECONDS_TO_RECORD = 20.0


def main() -> None:
    """Answers requests until SIGTERM, or until the doctor is killed: the ranks of torchrun outlive their agent."""
    if not sys.flags.safe_path:
        # The current folder, in which files of the user may have the names of libraries.
        del sys.path[0]
    become_subreaper()
    signal.signal(signal.SIGTERM, _end)
    die_with_parent(signal.SIGTERM)
    connection: Connection = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        while True:
            request = connection.recv()
            with mock.patch.dict(os.environ, request.get("variables", {})):
                for name in request.get("preload", ()):
                    with suppress(Exception):
                        importlib.import_module(name)
            if "view" in request:
                connection.send(private_view.make(*map(Path, request["view"])))
            if "folder" in request:
                connection.send(_run(request, connection))


def _end(*_: Any) -> None:
    """Ends this process and what it runs."""
    kill_children()
    os._exit(0)


def _run(request: dict[str, Any], connection: Connection) -> dict[str, int]:
    gc.collect()
    gc.freeze()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            connection.close()
            code = _child(request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    connection.send({"pid": child})
    _, status = os.waitpid(child, 0)
    if not status and request["command"]:
        _wait_for_records(Path(request["folder"]))
    kill_children()
    return {"code": os.waitstatus_to_exitcode(status)}


def _wait_for_records(folder: Path) -> None:
    """Waits for the ranks that a command leaves behind: Lightning's rank 0 ends without waiting for the others."""
    ranks, latest = read(folder).world_size, time.monotonic() + _SECONDS_TO_RECORD
    while time.monotonic() < latest and children_of(os.getpid()) and len(list(folder.glob("done*"))) < ranks:
        # One that has ended is among them until it is waited for.
        os.waitpid(-1, os.WNOHANG)
        time.sleep(0.05)


def _child(request: dict[str, Any]) -> int:
    die_with_parent()
    os.setsid()
    folder, command = Path(request["folder"]), request["command"]
    os.environ.update(request["environment"])
    for name in [name for name, value in request["environment"].items() if not value]:
        del os.environ[name]
    tempfile.tempdir = None
    if "namespaces" in request:
        private_view.enter(request["namespaces"], str(Path.cwd()))
    output = folder / ("output.txt" if command else f"output{os.environ['RANK']}.txt")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
    os.dup2(1, 2)
    if "copy" in request:
        command = folder_copy.enter(Path(request["copy"]), command)
    if command:
        # Interpreters that it starts install the probes.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
        if read(folder).purpose != "bare":
            os.environ[FOLDER] = str(folder)
            if request["forks"]:
                program_forks.start(folder)
        os.execvp(command[0], command)  # noqa: S606
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [sys.argv[0]]
    return run_rank(folder, read(folder))


if __name__ == "__main__":
    main()
