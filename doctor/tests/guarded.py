"""Runs every way of writing in a protected process, without an examination: `python guarded.py FOLDER`.

It prints one line of JSON per way: whether the program saw its writes, what has changed, and which protection it had.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import writing_programs
from snapshots import snapshot

from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.files.protection import Protection
from ddp_doctor.records.spec import Spec, Target


def start(protection: Protection, spec: Spec, work: Callable[[], None]) -> int:
    """Starts a process as a rank is started, and returns its ID."""
    request = protection.begin(spec, private_view.make)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        if "namespaces" in request:
            private_view.enter(request["namespaces"], str(Path.cwd()))
        else:
            folder_copy.enter(Path(request["copy"]), ())
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path) -> None:
    examination = folder / "examination"
    examination.mkdir()
    protection = Protection(examination)
    for way, work in writing_programs.WAYS.items():
        place = folder / way.replace(" ", "-").replace("/", "-")
        place.mkdir()
        writing_programs.prepare(place)
        os.chdir(place / "work")
        before = snapshot(place)
        pid = start(protection, Spec(Target("a:b")), work)
        code, after = exit_code(pid), snapshot(place)
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        row = {"way": way, "saw": code == 0, "changed": changed, "protection": protection.kind}
        print(json.dumps({**row, "not_covered": protection.not_covered}), flush=True)
    protection.end()
    assert not list(examination.iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
