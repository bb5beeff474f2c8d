"""Runs every way of writing in a protected process, without an examination: `python guarded.py FOLDER [--kill]`.

It prints one line of JSON per way: whether the program saw its writes, what has changed, and which protection it had.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import writing_programs
from snapshots import snapshot

from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.files.protection import Protection
from ddp_doctor.files.view_process import ViewProcess
from ddp_doctor.records.spec import Spec, Target


def run(way: str, work: Path, request: dict, *, forever: bool) -> None:
    """Runs a way of writing as a rank does."""
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if request.get("namespaces"):
        private_view.enter(request["namespaces"], str(work))
    else:
        folder_copy.enter(Path(request["copy"]), ())
    writing_programs.WAYS[way]()
    while forever:
        for other in random.sample(sorted(writing_programs.WAYS), 5):
            try:
                writing_programs.WAYS[other]()
            except Exception:  # noqa: S112
                continue


def main(folder: Path, *, kill: bool) -> None:
    views, examination = ViewProcess(), folder / "examination"
    examination.mkdir()
    protection = Protection(examination)
    for way in writing_programs.WAYS:
        place = folder / way.replace(" ", "-").replace("/", "-")
        place.mkdir()
        writing_programs.prepare(place)
        os.chdir(place / "work")
        before = snapshot(place)
        request = protection.begin(Spec(Target("a:b")), views.make)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(way, place / "work", request, forever=kill)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if kill:
            time.sleep(random.random())
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        after = snapshot(place)
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        row = {"way": way, "saw": code == 0, "changed": changed, "protection": protection.kind}
        print(json.dumps({**row, "not_covered": protection.not_covered}), flush=True)
    protection.end()
    assert not list(examination.iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]), kill="--kill" in sys.argv)
