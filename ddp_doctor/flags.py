"""The flags and the help of the command `doctor`. Nothing here imports torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

HELP = """\
usage: {program} doctor TARGET [--data TARGET] [FLAGS]
       {program} doctor --config theirs.yaml [FLAGS]
       {program} doctor [FLAGS] -- COMMAND

Examines a distributed training for silent faults. It runs your code in the current folder, with your rights, for a few
steps on one process and on several ranks, and compares them. It needs no GPU and no change of the code. The code sees
the files that it writes, but your files stay as they are.

TARGET is package.module:name or path/to/file.py:name: a LightningModule, or a function that runs on each rank without
arguments or with (rank, world_size). COMMAND starts its ranks itself, as torchrun does.

flags:
{flags}

exit codes: 0 no fault; 1 a fault; 2 the input is rejected, or the code fails on one process; 3 a rank hung or was lost
"""
# Flags without a value.
SWITCHES = frozenset({"--keep-output"})
FLAGS = {
    "--data": "the LightningDataModule; not needed if the module has its own loaders",
    "--config": "a configuration of LightningCLI that names the classes by class_path",
    "--args": "further arguments of a function; all words after it",
    "--devices": "number of ranks (default: 2)",
    "--steps": "optimizer steps per epoch; two epochs are run (default: 3)",
    "--samples": "most samples of a stream; a data set of up to 20 times as many is evaluated whole (default: 512)",
    "--only": "codes of checks, separated by commas, or `structural` for those that need no equal numbers",
    "--skip": "codes of checks to leave out, or `structural`",
    "--explain": "print the cause, the fix and the threads of a check, and exit",
    "--keep-output": "keep the files that the code writes, in a new folder doctor-output",
    "--json": "write the report to a file as JSON",
    "--html": "write the report to a file as an HTML page",
    "--timeout": "seconds after which a run counts as hung (default: 60)",
}


def help_of_doctor(words: Sequence[str], program: str) -> str:
    """Returns the help if the flags ask for it, otherwise nothing."""
    # What follows belongs to the examined code.
    end = min((words.index(mark) for mark in ("--", "--args") if mark in words), default=len(words))
    own = words[:end]
    if not {"--help", "-h"} & set(own):
        return ""
    width = max(map(len, FLAGS)) + 2
    rows = [
        textwrap.fill(f"  {flag:{width}}{text}", 118, subsequent_indent=" " * (width + 2))
        for flag, text in FLAGS.items()
    ]
    return HELP.format(program=program, flags="\n".join(rows))
