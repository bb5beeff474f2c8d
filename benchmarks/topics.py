"""What the benchmark measures, topic by topic, and the required ratios; each topic answers a question of a user."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.devices import devices
from benchmarks.gpu import gpu
from benchmarks.growth import growth
from benchmarks.plugin_topics import plugins, resume, together
from benchmarks.programs import TRAIN, printed, printed_numbers, train, wall_seconds
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic
from benchmarks.scaling import ScalingOptions, scaling
from benchmarks.waterfall import WaterfallOptions, waterfall
from lit_mnist.distributed.rank import threads_per_rank

# Enough for a median after the warm-up; no validation, and a short test.
_SHORT = ("--data.val_size", 0, "--data.test_size", 100, "--trainer.accelerator", "cpu")
_STEPS = 120
_SEED_RECIPE = (
    *("--lr", 1e-4, "--model.momentum", 0, "--model.nesterov", "false", "--model.schedule", "constant"),
    *("--batch-size", 32, "--data.batch_per", "rank", "--precision", "32-true", "--trainer.sync_batchnorm", "false"),
)
_PER_SAMPLE = (*_SEED_RECIPE, "--data.pipeline", "per_sample", "--data.workers", 4)
_SAVING = ("--batch-size", 64, "--save-every", 1)
_UNSYNCED = ("--trainer.sync_batchnorm", "false")
_IMPORT = ("-c", "import lightning.pytorch")
_IMPORT_TORCH = ("-c", "import torch")
_ALL_PACKAGES = """
import json, os
import torch, torchvision, lightning.pytorch, torchmetrics, jsonargparse
from lit_mnist.data.dataset import load_dataset
from lit_mnist.profiling.timing import unshared_memory
data = load_dataset()
print(json.dumps({"memory_bytes": unshared_memory(os.getpid())}))
"""


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
            Measurement("lightning, 1 rank", partial(_engine, "lightning", 1, _SEED_RECIPE)),
            Measurement("lightning, 1 rank, per_sample", partial(_engine, "lightning", 1, _PER_SAMPLE)),
            Measurement("classic demo, 2 processes", partial(_demo, 2, ())),
            Measurement("classic demo, 2 processes of a thread", partial(_demo, 2, ("--threads", 1))),
            Measurement("lightning, 2 ranks", partial(_engine, "lightning", 2, _SEED_RECIPE)),
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


def engines() -> Topic:
    """What does each way of training cost on two ranks, and how close is it to the limit of the machine?"""
    names = ("raw_ddp", "lightning", "fabric", "with_accelerate", "with_hf_trainer", "parameter_server")
    measurements = [
        Measurement("bare loop, 1 rank", partial(printed, ("-m", "benchmarks.bare", "train", "--steps", _STEPS)))
    ]
    measurements += [Measurement(f"{name}, 1 rank", partial(_engine, name, 1, ())) for name in ("single", "lightning")]
    measurements += [Measurement(f"{name}, 2 ranks", partial(_engine, name, 2, ())) for name in names]
    return Topic(
        name="engines",
        title="Images per second of every engine",
        measurements=measurements,
        ratios=(
            Ratio("lightning, 1 rank", "bare loop, 1 rank", at_least=0.9),
            Ratio("single, 1 rank", "bare loop, 1 rank"),
            *(Ratio(f"{name}, 2 ranks", "raw_ddp, 2 ranks") for name in names[1:]),
        ),
        notes=("The default experiment: batch 64 over all ranks, the precision that auto chooses here.",),
    )


def overhead() -> Topic:
    """What does Lightning add to raw DDP, and what does raw DDP add to ranks that only wait for each other?"""
    measurements: list[Measurement] = []
    for batch in (64, 256):
        size = ("--batch-size", batch)
        measurements += [
            Measurement(f"lock-step, batch {batch}", partial(_lockstep, batch)),
            Measurement(f"raw_ddp without sync, batch {batch}", partial(_engine, "raw_ddp", 2, (*size, *_UNSYNCED))),
            Measurement(f"raw_ddp, batch {batch}", partial(_engine, "raw_ddp", 2, size)),
            Measurement(f"lightning, batch {batch}", partial(_engine, "lightning", 2, size)),
        ]
    ratios: list[Ratio] = []
    for batch, least in ((64, 0.97), (256, 0.98)):
        ratios += [
            Ratio(f"lightning, batch {batch}", f"raw_ddp, batch {batch}", at_least=least),
            Ratio(f"raw_ddp without sync, batch {batch}", f"lock-step, batch {batch}", at_least=0.92),
            Ratio(f"raw_ddp, batch {batch}", f"raw_ddp without sync, batch {batch}"),
        ]
    saving = Measurement("raw_ddp, batch 64, saving each step", partial(_engine, "raw_ddp", 2, _SAVING))
    return Topic(
        name="overhead",
        title="What communication, batch norm, Lightning and saving add",
        measurements=(*measurements, saving),
        ratios=(*ratios, Ratio(saving.name, "raw_ddp, batch 64", at_least=0.85)),
        notes=("Two ranks, the precision that auto chooses here. Lock-step: one all-reduce of 4 bytes per step.",),
    )


def evaluation() -> Topic:
    """How fast are 10,000 images evaluated exactly?"""
    return Topic(
        name="evaluation",
        title="Evaluation of the 10,000 test images, one rank",
        measurements=(
            Measurement("bare inference loop", partial(printed, ("-m", "benchmarks.bare", "infer"))),
            Measurement("the same, normalizing each batch", partial(printed, ("-m", "benchmarks.bare", "infer-bytes"))),
            Measurement("lightning, exact metrics", partial(printed, ("-m", "benchmarks.bare", "lightning"))),
        ),
        ratios=(
            Ratio("lightning, exact metrics", "bare inference loop", at_least=0.95),
            Ratio("lightning, exact metrics", "the same, normalizing each batch"),
        ),
    )


def precision() -> Topic:
    """What do 16 bits gain in speed and memory?"""
    return Topic(
        name="precision",
        title="float32 against mixed precision, one rank, batch 256",
        measurements=[
            Measurement(name, partial(_engine, "lightning", 1, ("--precision", name, "--batch-size", 256), steps=steps))
            # Real float16 is emulated on most processors: few steps of it take long enough.
            for name, steps in (("32-true", 120), ("bf16-mixed", 120), ("16-mixed", 40))
        ],
        ratios=[Ratio("bf16-mixed", "32-true"), Ratio("16-mixed", "32-true")],
    )


def memory() -> Topic:
    """How much unshared memory does a rank use?"""
    bare = "a bare script that imports the same"
    ranks = {engine: f"one of 2 ranks, {engine}" for engine in ("lightning", "raw_ddp")}
    return Topic(
        name="memory",
        title="Unshared memory of a rank",
        measurements=(
            Measurement(bare, partial(printed, ("-c", _ALL_PACKAGES)), "memory_bytes"),
            *(Measurement(name, partial(_memory_of_a_rank, engine), "memory_bytes") for engine, name in ranks.items()),
        ),
        ratios=[Ratio(name, bare, at_most=1.0) for name in ranks.values()],
        notes=(
            "The highest of a run (USS), the launcher's own share included. What ranks and launcher share, such as the "
            "imports and the data, is counted in none of them.",
        ),
    )


TOPICS: dict[str, Callable[[], Topic]] = {
    **{make.__name__: make for make in (start, demo, seed, engines, overhead, evaluation, precision, memory)},
    "plugins": plugins,
    "together": together,
    "resume": resume,
    "waterfall": lambda: waterfall(WaterfallOptions()),
    "scaling": lambda: scaling(ScalingOptions()),
    "growth": growth,
    "devices": devices,
    "gpu": gpu,
}


def _first_step(engine: str, ranks: int, folder: Path) -> Numbers:
    result = train(folder, "--devices", ranks, "--max-steps", 1, *_SHORT, engine=engine)
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
    words = ("--folder", folder / "data", "--ranks", ranks, "--max-steps", _STEPS, *flags)
    return printed_numbers("-m", "benchmarks.classic_demo", *words, folder=folder)


def _lockstep(batch: int, folder: Path) -> Numbers:
    words = ("--ranks", 2, "--batch-size", batch, "--steps", _STEPS, "--threads", threads_per_rank(None, 2))
    return printed_numbers("-m", "benchmarks.lockstep", *words, "--precision", "auto", folder=folder)


def _engine(engine: str, ranks: int, flags: tuple[object, ...], folder: Path, steps: int = _STEPS) -> Numbers:
    result = train(folder, "--devices", ranks, "--max-steps", steps, *_SHORT, *flags, engine=engine)
    return {
        "images_per_s": float(result["train"]["images_per_s"]),
        "memory_bytes": float(result["peak_memory_bytes"]),
    }


def _memory_of_a_rank(engine: str, folder: Path) -> Numbers:
    return {"memory_bytes": _engine(engine, 2, (), folder, steps=60)["memory_bytes"] / 2}
