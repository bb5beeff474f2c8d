"""The exit of the command line loses nothing, although it does not visit the objects of imported modules."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

PROGRAM = """
import atexit, gc, gzip, sys
from lit_mnist.cli.entry import finish_imports, prepare
before = gc.get_threshold()
prepare()
import torch, mine
try:
    import triton
except ImportError:
    pass
assert gc.get_threshold() != before
finish_imports()
assert gc.get_threshold() == before and gc.get_freeze_count() > 100_000

class Held:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("destroyed", file=sys.stderr)

Held()
text, compressed = open("text.txt", "w"), gzip.open("compressed.gz", "wb")
text.write("text")
compressed.write(b"compressed")
atexit.register(lambda: print("own handler"))
sys.exit(3)
"""


def test_the_exit_closes_what_is_open_and_keeps_the_code(tmp_path: Path) -> None:
    """Open files are complete, destructors and own exit handlers run, and nothing else is printed."""
    # Its function refers to it, so that it is part of a reference cycle.
    (tmp_path / "mine.py").write_text("log = open('log.txt', 'w')\nlog.write('log')\ndef function(): return log\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "own handler\n", "destroyed\n")
    assert (tmp_path / "text.txt").read_text() == "text"
    assert (tmp_path / "log.txt").read_text() == "log"
    assert gzip.decompress((tmp_path / "compressed.gz").read_bytes()) == b"compressed"
