"""Measures what the README states, as ratios of interleaved measurements.

    python -m benchmarks                                   all topics, five rounds each
    python -m benchmarks --topics whole,start,engines,plugins,doctor --rounds 7
    python -m benchmarks --output bench.json

In each round, every program of a topic runs once, one after another, so that a change on the machine affects all of
them. A ratio is computed within each round. The table and the file have medians, and the smallest and largest value.
Run nothing else on the machine meanwhile. The programs use its GPUs, if there are any, and the precision that `auto`
selects; the classic demo trains three epochs in float32.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
Numbers = dict[str, Any]


class Program(NamedTuple):
    """A program of a topic: its name, and a function that runs it in an empty folder and returns numbers."""

    name: str
    run: Callable[[Path], Numbers]


class Ratio(NamedTuple):
    """The number `key` of one program, divided by that of another one, in each round."""

    of: str
    to: str
    key: str


class Topic(NamedTuple):
    """Programs that are measured in turn, the number that the table shows, and what is compared."""

    title: str
    key: str
    programs: Sequence[Program]
    ratios: Sequence[Ratio]


def call(words: Sequence[object], folder: Path, code: int = 0) -> tuple[float, str]:
    """Runs Python in the root of the repository, and returns the seconds from start to exit and the output.

    Raises:
        SystemExit: The program ended with another code.
    """
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{' '.join(map(str, words))} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds, done.stdout


def project(name: str, *words: object) -> Program:
    """Returns a command of the project, whose numbers come from its `result.json`."""

    def run(folder: Path) -> Numbers:
        seconds, _ = call([*words, "--run-dir", folder / "run"], folder)
        result = json.loads((folder / "run" / "result.json").read_text())
        return {
            "seconds": seconds,
            "images_per_s": result["train"]["images_per_s"],
            "seconds_to_first_step": result["seconds_to_first_step"],
            "accuracy": (result["test"] or {}).get("accuracy"),
            "precision": result["precision"],
            "commit": result["commit"],
            "versions": result["versions"],
        }

    return Program(name, run)


def program(name: str, *words: object, code: int = 0) -> Program:
    """Returns another program, which ends with this code; a last line of JSON has further numbers."""

    def run(folder: Path) -> Numbers:
        seconds, output = call(words, folder, code)
        last = (output.strip().splitlines() or [""])[-1]
        return {"seconds": seconds, **(json.loads(last) if last.startswith("{") else {})}

    return Program(name, run)


def topics(scratch: Path) -> dict[str, Topic]:
    """Returns the topics by name; `scratch` keeps the decoded MNIST of the classic demo."""
    train, raw = ("train.py",), ("-m", "lit_mnist.raw_ddp")
    two, steps = ("--devices", 2), ("--max-steps", 400)
    demo = ("-m", "benchmarks.classic_demo", "--folder", scratch)
    ranks = ("--standalone", "--nproc-per-node", "2")
    torchrun = Path(sys.executable).parent / "torchrun"
    doctor, healthy, faulty = ("-m", "ddp_doctor"), "doctor/examples/mended.py", "doctor/examples/train.py"
    return {
        "whole": Topic(
            "Whole runs, from start to exit",
            "seconds",
            [
                project("train.py, 1 rank", *train, "--devices", 1),
                project("train.py, 2 ranks", *train, *two),
                program("classic demo, 1 rank", *demo),
                program("classic demo, 2 ranks", *demo, "--ranks", 2),
            ],
            [Ratio(f"classic demo, {ranks}", f"train.py, {ranks}", "seconds") for ranks in ("1 rank", "2 ranks")],
        ),
        "start": Topic(
            "Imports, and a run of one step",
            "seconds",
            [
                program("import torch", "-c", "import torch"),
                program("import lightning.pytorch", "-c", "import lightning.pytorch"),
                program("import lit_mnist.cli", "-c", "import lit_mnist.cli"),
                project("train.py, 2 ranks, 1 step", *train, *two, "--max-steps", 1),
            ],
            [Ratio("import lit_mnist.cli", "import lightning.pytorch", "seconds")],
        ),
        "engines": Topic(
            "Lightning and raw DDP on two ranks",
            "images_per_s",
            [
                project(f"{name}, batch {size}", *words, *two, *steps, "--batch-size", size)
                for size in (64, 256)
                for name, words in (("Lightning", train), ("raw DDP", raw))
            ],
            [Ratio(f"Lightning, batch {size}", f"raw DDP, batch {size}", "images_per_s") for size in (64, 256)],
        ),
        "plugins": Topic(
            "A stock Trainer on two ranks",
            "images_per_s",
            [
                program("without plugins", "-m", "benchmarks.plugins"),
                program("with plugins", "-m", "benchmarks.plugins", "--with-plugins"),
            ],
            [Ratio("with plugins", "without plugins", "images_per_s")],
        ),
        "doctor": Topic(
            "The doctor on its example",
            "seconds",
            [
                program("the program itself", torchrun, *ranks, healthy),
                program("ddp-doctor --read", *doctor, "--read", healthy),
                program("ddp-doctor, healthy", *doctor, "--", torchrun, *ranks, healthy),
                program("ddp-doctor, two faults", *doctor, "--", torchrun, *ranks, faulty, code=1),
            ],
            [
                Ratio(name, "the program itself", "seconds")
                for name in ("ddp-doctor --read", "ddp-doctor, healthy", "ddp-doctor, two faults")
            ],
        ),
    }


def measure(topic: Topic, rounds: int) -> Numbers:
    """Measures a topic, and returns its numbers."""
    rows: dict[str, list[Numbers]] = {each.name: [] for each in topic.programs}
    for number in range(rounds):
        for each in topic.programs:
            print(f"round {number + 1} of {rounds}: {each.name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                rows[each.name].append(each.run(Path(folder)))
    return {
        "title": topic.title,
        "key": topic.key,
        "runs": rows,
        "medians": {name: spread([run[topic.key] for run in runs]) for name, runs in rows.items()},
        "ratios": {
            f"{ratio.of} / {ratio.to}": spread(
                [one[ratio.key] / other[ratio.key] for one, other in zip(rows[ratio.of], rows[ratio.to], strict=True)]
            )
            for ratio in topic.ratios
        },
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, the smallest and the largest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(found: Numbers) -> str:
    """Returns the numbers of a topic as text."""
    lines = [f"{found['title']} ({found['key']})"]
    for name, row in (*found["medians"].items(), *found["ratios"].items()):
        lines.append(f"  {name:58} {row['median']:10.4g}  ({row['min']:.4g} to {row['max']:.4g})")
    return "\n".join(lines)


def machine() -> Numbers:
    """Returns the processor, and the cores that this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": names[0] if names else platform.processor(), "cores": len(os.sched_getaffinity(0))}


def main() -> None:
    """Measures, prints the tables, and writes the file after each topic."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topics", help="some of whole,start,engines,plugins,doctor; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        known = topics(Path(scratch))
        names = options.topics.split(",") if options.topics else list(known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no topic {unknown[0]}: choose of {', '.join(known)}")
        if options.rounds < 1:
            parser.error("--rounds must be at least 1")
        result: Numbers = {"machine": machine(), "rounds": options.rounds, "topics": {}}
        for name in names:
            result["topics"][name] = measure(known[name], options.rounds)
            options.output.write_text(json.dumps(result, indent=2) + "\n")
            print(table(result["topics"][name]), flush=True)


if __name__ == "__main__":
    main()
