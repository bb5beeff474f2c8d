"""The tour of the collective operations, in real processes on this machine.

    python -m examples.collectives                 the tour, with three ranks
    python -m examples.collectives --ranks 4
    python -m examples.collectives --bench --ranks 2 --json bench.json --plot

The tour shows the tensors before and after every collective operation, the ways to initialize a process group, a
timeout, and a hand-written ring all-reduce and parameter server with the bytes that they send. The benchmark
measures latency and bandwidth of all-reduce over the message size. Both use gloo on the CPU, also on a machine with
GPUs: NCCL shows the same, but needs one GPU per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from examples.collectives.bench import LARGEST, SMALLEST, bench
from examples.collectives.initialize import show_ways
from examples.collectives.missing import show_timeout
from examples.collectives.operations import show_operations
from examples.collectives.plot import FORMATS, write_plot
from examples.collectives.traffic import show_traffic
from lit_mnist.distributed.launcher import Work, launch
from lit_mnist.distributed.rank import Rank, threads_per_rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import print_error, print_stop
from lit_mnist.errors import InputError, LitMnistError

MOST_RANKS = 32
MOST_BYTES = 1024**3
MEASURED = "measured.json"


def main(argv: list[str] | None = None) -> int:
    """Runs the tour or the benchmark and returns the exit code.

    Args:
        argv: The arguments; `sys.argv[1:]` by default.
    """
    # The ranks are forked from this process, which must not start OpenMP threads before.
    torch.set_num_threads(1)
    try:
        options = _options(sys.argv[1:] if argv is None else argv)
        STOP.listen()
        with tempfile.TemporaryDirectory(prefix="lit_mnist-") as name:
            scratch = Path(name)
            for part in _parts(options, scratch):
                work = partial(_in_rank, part)
                logs = scratch / "logs"
                launch(work, world_size=options.ranks, max_restarts=0, logs=logs)
            if options.bench:
                _write(options, json.loads((scratch / MEASURED).read_text()))
    except LitMnistError as error:
        print_error(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, SignalException) as error:
        # Between two parts of the tour: torch's agent leaves its signal handlers installed.
        signum = signal.Signals(error.sigval if isinstance(error, SignalException) else signal.SIGINT)
        print_stop(f"Stopped by {signum.name}.", signum)
        return 128 + signum
    return 0


def _parts(options: argparse.Namespace, scratch: Path) -> list[Work]:
    """Returns the parts, each of which runs in new processes."""
    if options.bench:
        return [partial(_bench, options.largest, scratch)]
    return [show_operations, partial(show_ways, scratch), show_timeout, show_traffic]


def _in_rank(part: Work, rank: Rank) -> None:
    torch.set_num_threads(threads_per_rank(None, rank.local_world_size))
    part(rank)


def _bench(largest: int, scratch: Path, rank: Rank) -> None:
    measured = bench(rank, largest)
    if rank.is_first:
        (scratch / MEASURED).write_text(json.dumps(measured))


def _write(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    try:
        if options.json:
            options.json.write_text(json.dumps(measured, indent=2) + "\n")
        if options.plot:
            write_plot(options.plot, measured)
    except OSError as error:
        raise InputError(f"The measurements cannot be written: {error}.") from error


class _Parser(argparse.ArgumentParser):
    """Rejects arguments with a one-line message instead of the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m examples.collectives",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help=f"processes, 2 to {MOST_RANKS} (3)")
    parser.add_argument(
        "--bench", action="store_true", help="time all-reduce over the message sizes instead of the tour"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements of the benchmark")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=Path("collectives.png"),
        metavar="FILE",
        help="draw the measurements of the benchmark (collectives.png)",
    )
    parser.add_argument("--largest", type=int, metavar="BYTES", help=f"largest message of the benchmark ({LARGEST})")
    options = parser.parse_args(argv)
    if not 2 <= options.ranks <= MOST_RANKS:
        raise InputError(f"--ranks is {options.ranks}: between 2 and {MOST_RANKS} ranks are possible.")
    for name in ("json", "plot", "largest"):
        if getattr(options, name) is not None and not options.bench:
            raise InputError(f"--{name} belongs to the benchmark: add --bench.")
    options.largest = LARGEST if options.largest is None else options.largest
    if not SMALLEST <= options.largest <= MOST_BYTES:
        raise InputError(f"--largest is {options.largest}: between {SMALLEST} and {MOST_BYTES} bytes are possible.")
    if options.plot and options.plot.suffix.lower() not in FORMATS:
        raise InputError(f"--plot is {options.plot}: the file's name must end in {', '.join(FORMATS)}.")
    for name in ("json", "plot"):
        _require_writable(f"--{name}", getattr(options, name))
    return options


def _require_writable(flag: str, path: Path | None) -> None:
    """Rejects an output file before the benchmark runs."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{flag} is {path}, which is a folder: name a file.")
    if not path.parent.is_dir():
        raise InputError(f"{flag} is {path}, but there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{flag} is {path}, which cannot be written.")


if __name__ == "__main__":
    sys.exit(main())
