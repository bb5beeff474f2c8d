"""The command `ddp-doctor watch`. Imports no torch."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError
from ddp_doctor.findings import Finding, Report, Verdict
from ddp_doctor.flags import Parser
from ddp_doctor.output.terminal import print_text
from ddp_doctor.watch.comparison import Comparison

_SITE = Path(__file__).parents[1] / "launch" / "site"
_ABOUT = """\
Runs a training command as it is, for its whole length, and compares its ranks while it runs: weights, learning rates,
modes, random numbers, gradients, and which samples they take. It never ends or changes the run."""
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
    every = "optimizer steps between two records, at least (default: 10)"
    parser.add_argument("--every", metavar="N", type=int, default=10, help=every)
    records = "keep the records of the ranks and the report watch.json in a folder, which all machines of a run see"
    parser.add_argument("--records", metavar="FOLDER", help=records)
    request = parser.parse_words(words[:mark])
    command = list(words[mark + 1 :])
    if not command:
        raise InputError("Give the command that trains after --, such as: ddp-doctor watch -- torchrun train.py")
    if request.every < 1:
        raise InputError(f"--every {request.every}: at least one step lies between two records.")
    with ExitStack() as stack:
        if request.records is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-doctor-watch-")))
        else:
            folder = _new_folder(Path(request.records).absolute())
        comparison = Comparison(folder, _tell)
        code = _run(command, folder, request.every, comparison)
        report = comparison.finish()
    _summarize(command, comparison, report)
    return code or report.exit_code


def _new_folder(folder: Path) -> Path:
    if any(folder.glob("rank*.jsonl")):
        raise InputError(f"--records {folder}: the folder has the records of another run; name a new one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".write").touch()
        (folder / ".write").unlink()
    except OSError as error:
        raise InputError(f"--records {folder}: {error.strerror}.") from error
    return folder


def _run(command: list[str], folder: Path, every: int, comparison: Comparison) -> int:
    path = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    watched = {"DDP_DOCTOR_WATCH": json.dumps([str(folder), every]), "PYTHONPATH": path}
    if command[0] == "python" or command[0] == "python3":
        # The interpreter that has this package.
        command = [sys.executable, *command[1:]]
    with _forwarded_signals() as forward_to:
        try:
            process = subprocess.Popen(command, env={**os.environ, **watched})
        except OSError as error:
            raise InputError(f"{command[0]}: {error.strerror}.") from error
        forward_to(process)
        while True:
            try:
                code = process.wait(timeout=1.0)
                return 128 - code if code < 0 else code
            except subprocess.TimeoutExpired:
                comparison.read()


@contextmanager
def _forwarded_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Passes signals on to the process that the yielded function is given; one of the keyboard reaches it anyway.

    A signal that arrives before the process is known is passed on as soon as it is.
    """
    early: list[int] = []
    known: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, _: Any) -> None:
        if signum == signal.SIGINT:
            return
        if known:
            known[0].send_signal(signum)
        else:
            early.append(signum)

    def forward_to(process: subprocess.Popen[bytes]) -> None:
        known.append(process)
        for signum in early:
            process.send_signal(signum)

    chosen = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {signum: signal.signal(signum, forward) for signum in chosen if signal.getsignal(signum) != signal.SIG_IGN}
    try:
        yield forward_to
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _tell(finding: Finding) -> None:
    print_text(f"ddp-doctor watch: {finding.verdict.value}: {finding.code}: {finding.message}", sys.stderr)


def _summarize(command: Sequence[str], comparison: Comparison, report: Report) -> None:
    steps = max(comparison.last.values(), default=0)
    if not comparison.last:
        text = "no optimizer step was seen: nothing was compared."
    elif comparison.compared == 0:
        text = f"{len(comparison.last)} rank, {steps} optimizer steps: there was no other rank to compare it with."
    else:
        share = max((end["share"] for end in comparison.ends.values()), default=0.0)
        text = f"{len(comparison.last)} ranks were compared {comparison.compared} times in {steps} optimizer steps"
        text += f" ({share:.1%} of the time): " if comparison.ends else ": "
        text += "; ".join(f"{f.code} {f.message}" for f in report.of(Verdict.FAULT)) or "no fault was seen."
    ended = [(rank, end["end"]) for rank, end in comparison.ends.items() if end["end"]]
    stopped = [f"The watch of rank {rank} ended early: {why}." for rank, why in ended]
    print_text(" ".join([f"ddp-doctor watch: {shlex.join(command)}: {text}", *stopped]), sys.stderr)
