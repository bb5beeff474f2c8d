"""An interpreter that runs the user's code in forks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast


class Interpreter:
    """An interpreter that has imported the libraries, and runs the user's code in forks.

    Args:
        rank: Rank of its runs; sets have another order on each rank.
        folder: Folder of the examination, for what libraries write when they are imported.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(rank + 1),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ddp_doctor.launch.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
            # Ctrl-C is for the command alone, which ends its runs.
            start_new_session=True,
        )
        self._pid = 0

    def tell(self, request: dict[str, Any]) -> None:
        """Sends a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")

    def answer(self, timeout: float) -> dict[str, Any] | None:
        """Returns the next answer; None if there is none in time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("An interpreter of the doctor has ended.")
        found = cast(dict[str, Any], json.loads(line))
        if "code" in found:
            self._pid = 0
        return found

    def begin(self, request: dict[str, Any]) -> int:
        """Starts a run, and returns its process ID."""
        self.tell(request)
        self._pid = int(self.wait_for(60.0)["pid"])
        return self._pid

    def make_view(self, folder: Path, layers: Path) -> dict[str, Any]:
        """Makes a private view; see `ViewProcess.make`."""
        self.tell({"view": [str(folder), str(layers)]})
        return self.wait_for(60.0)

    def wait_for(self, timeout: float) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
            RuntimeError: There is none in time.
        """
        found = self.answer(timeout)
        if found is None:
            raise RuntimeError("An interpreter of the doctor does not answer.")
        return found

    def close(self) -> None:
        """Ends the interpreter and what it runs."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(RuntimeError):
                # It ends the processes that are left.
                self.answer(10.0)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
