"""How long the command takes from its start to its first step and to its exit, beside imports and the classic demo."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from benchmarks.programs import SHORT, STEPS, TRAIN, printed_numbers, short_run, train, wall_seconds
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic

_SEED_RECIPE = (
    *("--lr", 1e-4, "--model.momentum", 0, "--model.nesterov", "false", "--model.schedule", "constant"),
    *("--batch-size", 32, "--data.batch_per", "rank", "--precision", "32-true", "--trainer.sync_batchnorm", "false"),
)
_PER_SAMPLE = (*_SEED_RECIPE, "--data.pipeline", "per_sample", "--data.workers", 4)
_IMPORT = ("-c", "import lightning.pytorch")
_IMPORT_TORCH = ("-c", "import torch")


def start() -> Topic:
    """How long does `--help` take, and how long until the first step?"""
    return Topic(
        name="start",
        title="Start-up",
        measurements=(
            Measurement("import lightning.pytorch", partial(wall_seconds, _IMPORT), "seconds"),
            Measurement("import torch", partial(wall_seconds, _IMPORT_TORCH), "seconds"),
            Measurement("train.py --help", partial(wall_seconds, (TRAIN, "--help")), "seconds"),
            Measurement("first step of --devices 2", partial(_first_step, "lightning", 2), "seconds"),
            Measurement("first step of raw_ddp, 1 rank", partial(_first_step, "raw_ddp", 1), "seconds"),
        ),
        ratios=(
            Ratio("train.py --help", "import torch", at_most=0.1),
            Ratio("first step of --devices 2", "import lightning.pytorch", at_most=0.7),
            Ratio("first step of raw_ddp, 1 rank", "import torch", at_most=1.3),
        ),
        notes=("Each from the start of its process; the first step to its end.",),
    )


def demo() -> Topic:
    """How long does the whole command take, against the classic demo's three epochs?"""
    return Topic(
        name="demo",
        title="From start to exit, against the classic demo",
        measurements=(
            Measurement("train.py", _whole_run, "seconds"),
            Measurement("classic demo, 3 epochs", _whole_demo, "seconds"),
        ),
        ratios=(Ratio("train.py", "classic demo, 3 epochs", at_most=0.143),),
        notes=(
            "The default experiment on one rank, one epoch, with validation, test and report. The demo is "
            "benchmarks/classic_demo.py: torchvision's MNIST, transforms per sample, four loader workers.",
        ),
    )


def seed() -> Topic:
    """How many images per second does the demo's own recipe train here?"""
    return Topic(
        name="seed",
        title="The classic demo's recipe",
        measurements=(
            Measurement("classic demo, 1 process", partial(_demo, 1, ())),
            Measurement("lightning, 1 rank", partial(short_run, "lightning", 1, _SEED_RECIPE)),
            Measurement("lightning, 1 rank, per_sample", partial(short_run, "lightning", 1, _PER_SAMPLE)),
            Measurement("classic demo, 2 processes", partial(_demo, 2, ())),
            Measurement("classic demo, 2 processes of a thread", partial(_demo, 2, ("--threads", 1))),
            Measurement("lightning, 2 ranks", partial(short_run, "lightning", 2, _SEED_RECIPE)),
        ),
        ratios=(
            Ratio("lightning, 1 rank", "classic demo, 1 process", at_least=1.6),
            Ratio("lightning, 2 ranks", "classic demo, 2 processes", at_least=2.8),
            Ratio("lightning, 1 rank, per_sample", "classic demo, 1 process"),
            Ratio("lightning, 2 ranks", "classic demo, 2 processes of a thread"),
            Ratio("lightning, 2 ranks", "lightning, 1 rank"),
        ),
        notes=(
            "SGD at 1e-4, 32 images per rank, float32, batch norm not synchronized. per_sample is the demo's own data "
            "path (--data.pipeline per_sample --data.workers 4).",
            "The demo leaves its threads to torch: each of its processes takes all cores. So it is measured with one "
            "thread each, too, which is what a rank here has on two cores.",
            "On as many cores, two ranks of one thread are no faster than one rank of two threads: they do the same "
            "work, and wait for each other at each step.",
        ),
    )


def _first_step(engine: str, ranks: int, folder: Path) -> Numbers:
    result = train(folder, "--devices", ranks, "--max-steps", 1, *SHORT, engine=engine)
    return {"seconds": float(result["seconds_to_first_step"])}


def _whole_run(folder: Path) -> Numbers:
    began = time.perf_counter()
    result = train(folder, "--devices", 1, "--trainer.accelerator", "cpu")
    return {"seconds": time.perf_counter() - began, "accuracy": float(result["test"]["accuracy"])}


def _whole_demo(folder: Path) -> Numbers:
    began = time.perf_counter()
    numbers = printed_numbers("-m", "benchmarks.classic_demo", "--folder", folder / "data", folder=folder)
    return {"seconds": time.perf_counter() - began, "accuracy": numbers["accuracy"]}


def _demo(ranks: int, flags: tuple[object, ...], folder: Path) -> Numbers:
    words = ("--folder", folder / "data", "--ranks", ranks, "--max-steps", STEPS, *flags)
    return printed_numbers("-m", "benchmarks.classic_demo", *words, folder=folder)
