"""The command `ddp-doctor watch`. Imports no torch."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ddp_doctor.errors import InputError
from ddp_doctor.findings import Finding, Report
from ddp_doctor.flags import Parser
from ddp_doctor.output.terminal import print_text
from ddp_doctor.processes import recorded_signals
from ddp_doctor.watch.comparison import WatchedRanks

_SITE = Path(__file__).parents[1] / "launch" / "site"
_ABOUT = """\
Runs a training command as it is, for its whole length, and compares its ranks while it runs: weights, learning rates,
modes, and which samples they take. It never ends or changes the run."""
_EXIT_CODES = """\
exit codes: that of the command; if it is 0, 1 for a fault. 2: the input is rejected, and nothing was run"""


def main(words: Sequence[str]) -> int:
    """Runs the command, and returns its exit code.

    Args:
        words: The words after `watch`.

    Raises:
        InputError: A flag is wrong; nothing was run.
    """
    mark = words.index("--") if "--" in words else len(words)
    parser = Parser("ddp-doctor watch", "ddp-doctor watch [FLAGS] -- COMMAND", _ABOUT, _EXIT_CODES, allow_abbrev=False)
    records = "keep the records of the ranks and the report watch.json in a folder, which all machines of a run see"
    parser.add_argument("--records", metavar="FOLDER", help=records)
    request, command = parser.parse_args(words[:mark]), list(words[mark + 1 :])
    if not command:
        parser.error("the command that trains is missing: ddp-doctor watch -- torchrun --nproc-per-node 2 train.py")
    with ExitStack() as stack:
        if request.records is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-doctor-watch-")))
        else:
            folder = _new_folder(Path(request.records).absolute())
        ranks = WatchedRanks(folder, _tell)
        code = _run(command, folder, ranks)
        report = ranks.finish()
    print_text(f"ddp-doctor watch: {shlex.join(command)}: {_summary(ranks, report)}", sys.stderr)
    return code or report.exit_code


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--records {folder}: {error.strerror}.") from error
    if any(folder.glob("rank*.jsonl")):
        raise InputError(f"--records {folder}: the folder has the records of another run; name a new one.")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--records {folder}: the folder cannot be written.")
    return folder


def _tell(finding: Finding) -> None:
    print_text(f"ddp-doctor watch: {finding.verdict.value}: {finding.code}: {finding.message}", sys.stderr)


def _run(command: list[str], folder: Path, ranks: WatchedRanks) -> int:
    """Runs a command, passes signals on to it, and returns its exit code."""
    path = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    if command[0] in {"python", "python3"}:
        # The interpreter that has this package.
        command = [sys.executable, *command[1:]]
    environment = {**os.environ, "DDP_DOCTOR_WATCH": str(folder), "PYTHONPATH": path}
    with recorded_signals() as received:
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise InputError(f"{command[0]}: {error.strerror}.") from error
        while process.poll() is None:
            time.sleep(0.1)
            ranks.read()
            while received:
                # That of the keyboard reaches the process anyway.
                if (signum := received.pop(0)) != signal.SIGINT:
                    process.send_signal(signum)
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _summary(ranks: WatchedRanks, report: Report) -> str:
    """Returns what was compared and found, in one line."""
    share = max((end["share"] for end in ranks.ends.values()), default=0.0)
    found = "; ".join(f"{finding.code} {finding.message}" for finding in report.faults)
    parts = [
        f"{len(ranks.last)} ranks were compared {ranks.compared} times in "
        f"{max(ranks.last.values(), default=0)} optimizer steps ({share:.1%} of the time): "
        f"{found or ('no fault was seen' if ranks.compared else 'nothing was compared')}."
    ]
    for rank, end in ranks.ends.items():
        parts += [f"The watch of rank {rank} ended early: {end['end']}."] if end["end"] else []
    return " ".join(parts)
