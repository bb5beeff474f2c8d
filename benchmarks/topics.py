"""What the benchmark measures, topic by topic, and the required ratios; each topic answers a question of a user."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.devices import devices
from benchmarks.gpu import gpu
from benchmarks.growth import growth
from benchmarks.plugin_topics import plugins, resume, together
from benchmarks.programs import STEPS, printed, printed_numbers, short_run
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic
from benchmarks.scaling import ScalingOptions, scaling
from benchmarks.waterfall import WaterfallOptions, waterfall
from benchmarks.whole_runs import demo, seed, start
from lit_mnist.distributed.rank import threads_per_rank

_SAVING = ("--batch-size", 64, "--save-every", 1)
_UNSYNCED = ("--trainer.sync_batchnorm", "false")
_ALL_PACKAGES = """
import json, os
import torch, torchvision, lightning.pytorch, torchmetrics, jsonargparse
from lit_mnist.data.dataset import load_dataset
from lit_mnist.profiling.timing import unshared_memory
data = load_dataset()
print(json.dumps({"memory_bytes": unshared_memory(os.getpid())}))
"""


def engines() -> Topic:
    """What does each way of training cost on two ranks, and how close is it to the limit of the machine?"""
    names = ("raw_ddp", "lightning", "fabric", "with_accelerate", "with_hf_trainer", "parameter_server")
    measurements = [
        Measurement("bare loop, 1 rank", partial(printed, ("-m", "benchmarks.bare", "train", "--steps", STEPS)))
    ]
    measurements += [
        Measurement(f"{name}, 1 rank", partial(short_run, name, 1, ())) for name in ("single", "lightning")
    ]
    measurements += [Measurement(f"{name}, 2 ranks", partial(short_run, name, 2, ())) for name in names]
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
            Measurement(f"raw_ddp without sync, batch {batch}", partial(short_run, "raw_ddp", 2, (*size, *_UNSYNCED))),
            Measurement(f"raw_ddp, batch {batch}", partial(short_run, "raw_ddp", 2, size)),
            Measurement(f"lightning, batch {batch}", partial(short_run, "lightning", 2, size)),
        ]
    ratios: list[Ratio] = []
    for batch, least in ((64, 0.97), (256, 0.98)):
        ratios += [
            Ratio(f"lightning, batch {batch}", f"raw_ddp, batch {batch}", at_least=least),
            Ratio(f"raw_ddp without sync, batch {batch}", f"lock-step, batch {batch}", at_least=0.92),
            Ratio(f"raw_ddp, batch {batch}", f"raw_ddp without sync, batch {batch}"),
        ]
    saving = Measurement("raw_ddp, batch 64, saving each step", partial(short_run, "raw_ddp", 2, _SAVING))
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
            Measurement(
                name, partial(short_run, "lightning", 1, ("--precision", name, "--batch-size", 256), steps=steps)
            )
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


def _lockstep(batch: int, folder: Path) -> Numbers:
    words = ("--ranks", 2, "--batch-size", batch, "--steps", STEPS, "--threads", threads_per_rank(None, 2))
    return printed_numbers("-m", "benchmarks.lockstep", *words, "--precision", "auto", folder=folder)


def _memory_of_a_rank(engine: str, folder: Path) -> Numbers:
    return {"memory_bytes": short_run(engine, 2, (), folder, steps=60)["memory_bytes"] / 2}
