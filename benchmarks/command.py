"""Measures what training costs here, as ratios of interleaved measurements.

    python -m benchmarks
    python -m benchmarks --topics start,overhead --repeats 9
    python -m benchmarks --config configs/voc.yaml

The run folder gets `bench.json` and `bench.html`, the page of it. Run nothing else on the machine meanwhile.
With --config, the whole training of an experiment is measured on the devices of this machine: the topic `devices`. It
and the topic `gpu` use the GPUs, if there are any; all others measure the processor.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.devices import devices
from benchmarks.pages.page import text, write_bench
from benchmarks.rounds import check_repeats, run_rounds
from benchmarks.topics import TOPICS
from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.distributed.rank import count_cores, launched_from_outside
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_error
from lit_mnist.errors import InputError, LitMnistError, StoppedError, nearest
from lit_mnist.profiling.timing import commit, versions
from lit_mnist.run.folder import RunFolder

JSON, PAGE = "bench.json", "bench.html"
DEVICES, GPU = "devices", "gpu"


def main(argv: list[str] | None = None) -> int:
    """Runs the bench and returns its exit code.

    Args:
        argv: The arguments; by default the process's own.
    """
    # Some topics fork from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    STOP.listen()
    words = sys.argv[1:] if argv is None else argv
    try:
        return bench(words, shlex.join(["python", "-m", "benchmarks", *words]))
    except LitMnistError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def bench(argv: list[str], command: str) -> int:
    """Runs the bench, and returns the exit code: 0, or 2 if a topic could not be measured.

    Raises:
        InputError: The command line is rejected.
    """
    if launched_from_outside():
        raise InputError("bench starts what it measures itself: run it without a launcher.")
    options = _options(argv)
    # Everything is checked before anything is measured.
    topics = {name: TOPICS[name]() for name in options.topics if name != DEVICES}
    if DEVICES in options.topics:
        topics[DEVICES] = devices(Path(options.config[0]) if options.config else None, options.steps)
    folder = RunFolder.claim(
        Path(options.run_dir).absolute() if options.run_dir else None, name="bench", writes=(JSON, PAGE)
    )
    STOP.listen(_stop)
    failed = 0
    found: dict[str, Any] = {
        "machine": machine(),
        "repeats": options.repeats,
        "topics": {},
        "versions": versions(),
        "commit": commit(),
        "command": command,
    }

    def save(name: str, numbers: dict[str, Any]) -> None:
        # After each round, so that what was measured stays if the rest is interrupted.
        found["topics"][name] = numbers
        _write(folder.path, found)

    try:
        _write(folder.path, found)
        for name, topic in topics.items():
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    run_rounds(topic, options.repeats, Path(scratch), _log, partial(save, name))
                except InputError as error:
                    failed += 1
                    _log(f"error: {name} could not be measured{' completely' * (name in found['topics'])}. {error}")
    finally:
        folder.release()
    print(text(found))
    print(f"results   {display_path(folder.path / JSON)}, {display_path(folder.path / PAGE)}")
    sys.stdout.flush()
    return InputError.exit_code if failed else 0


def _write(folder: Path, found: dict[str, Any]) -> None:
    write_text(folder / JSON, json.dumps(found, indent=2) + "\n")
    write_bench(folder / PAGE, found)


def machine() -> dict[str, Any]:
    """Returns the processor, the number of cores and the GPUs."""
    return {"processor": _processor(), "cores": count_cores(), "gpus": _gpus()}


def _gpus() -> list[str]:
    """Returns the names of the GPUs, as reported by their driver, without using one."""
    if not torch.cuda.device_count():
        return []
    words = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[0].upper()}{message[1:]}. See: python -m benchmarks --help")


def _options(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--topics", help=f"all that this machine has (the default), or some of {', '.join(TOPICS)}")
    parser.add_argument("--config", action="append", help=f"an experiment as YAML, for the topic {DEVICES} alone")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of each run of the topic {DEVICES}")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each topic")
    parser.add_argument("--run-dir", help="the folder to write into; by default runs/<time>-bench")
    options = parser.parse_args(argv)
    check_repeats(options.repeats)
    if options.config is not None and len(options.config) > 1:
        raise InputError(f"--config is given {len(options.config)} times: bench times one experiment, of one file.")
    chosen = options.topics if options.topics is not None else "all" if options.config is None else DEVICES
    every = [name for name in TOPICS if name != GPU or torch.cuda.device_count()]
    names = every if chosen == "all" else chosen.split(",")
    for name in names:
        if name not in TOPICS:
            raise InputError(f"Unknown topic {name!r}{nearest(name, TOPICS) or ': use ' + ', '.join(TOPICS) + '.'}")
    options.topics = list(dict.fromkeys(names))
    if options.config is not None and options.topics != [DEVICES]:
        raise InputError(f"--config is for the topic {DEVICES} alone: leave --topics out, or name no other.")
    if options.steps is not None and DEVICES not in options.topics:
        raise InputError(f"--steps is for the topic {DEVICES}: leave it out, or name that topic.")
    return options


def _log(text: str) -> None:
    print_error(text)


def _stop(signum: signal.Signals) -> None:
    raise StoppedError(f"Stopped by {signum.name}.", signum)
