"""The default experiment on one GPU: engines, precisions, and the distance to the peak rates of the GPU.

    python -m benchmarks --topics gpu
    python -m benchmarks.gpu product    the rate of matrix products, and what it would train
    python -m benchmarks.gpu copy       the rate of copies within the GPU's memory

The last two print JSON in their last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.programs import printed_numbers, train
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net

_SIDE = 8192
_COPIED_BYTES = 2**30
_REPEATS = 20
_QUEUED = ("--run.cuda_graph", "false")
_BF16 = ("--precision", "bf16-mixed")
_PEAK = "what the matrix units' own rate would train"


def gpu() -> Topic:
    """How fast does one GPU train, and what limits it?

    Raises:
        InputError: There is none.
    """
    if not torch.cuda.device_count():
        raise InputError("The topic gpu measures a GPU, but this machine has none: leave it out.")
    ways: dict[str, tuple[str, tuple[object, ...]]] = {
        "single, 16-mixed, kernel by kernel": ("single", _QUEUED),
        "single, 16-mixed": ("single", ()),
        "single, bf16-mixed": ("single", _BF16),
        "single, 32-true": ("single", ("--precision", "32-true")),
        "single, bf16-mixed, compiled": ("single", (*_BF16, "--model.compile", "true")),
        "lightning, 16-mixed": ("lightning", ()),
        "lightning, bf16-mixed": ("lightning", _BF16),
        "raw_ddp, 16-mixed, kernel by kernel": ("raw_ddp", ()),
    }
    return Topic(
        name="gpu",
        title="One GPU, the default experiment",
        measurements=(
            *(Measurement(name, partial(_epoch, *way)) for name, way in ways.items()),
            Measurement(_PEAK, partial(_peak, "product")),
            Measurement("copies within its memory", partial(_peak, "copy"), "bytes_per_s"),
        ),
        ratios=(
            Ratio("single, 16-mixed", "single, 16-mixed, kernel by kernel"),
            Ratio("single, bf16-mixed", "single, 32-true"),
            Ratio("single, 16-mixed", "single, 32-true"),
            Ratio("single, bf16-mixed, compiled", "single, bf16-mixed"),
            Ratio("lightning, bf16-mixed", "single, bf16-mixed"),
            Ratio("single, bf16-mixed", _PEAK),
        ),
        notes=(
            "One epoch: 859 steps of 64 images, 54,976 in all. What is not said to go kernel by kernel replays a "
            "recorded graph of both passes. Peak memory is that of the tensors on the GPU.",
            f"The matrix units' rate is that of bfloat16 products of {_SIDE} x {_SIDE} random numbers, divided by the "
            "operations of both passes. Copies count what is read and what is written.",
        ),
    )


def _epoch(engine: str, flags: tuple[object, ...], folder: Path) -> Numbers:
    result = train(folder, "--devices", 1, "--trainer.accelerator", "gpu", *flags, engine=engine, gpus=True)
    return {
        "images_per_s": float(result["train"]["images_per_s"]),
        "memory_bytes": float(result["peak_gpu_memory_bytes"]),
        "accuracy": float(result["test"]["accuracy"]),
    }


def _peak(what: str, folder: Path) -> Numbers:
    return printed_numbers("-m", "benchmarks.gpu", what, folder=folder, gpus=True)


def product() -> Numbers:
    """Returns the operations per second of large matrix products, and the images that they would train."""
    left, right = (torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rate = 2 * _SIDE**3 / _median_seconds(lambda: left @ right)
    return {"images_per_s": rate / operations_per_image(), "operations_per_s": rate}


def copy() -> Numbers:
    """Returns the bytes that are read and written per second by a large copy."""
    source = torch.randint(256, (_COPIED_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"bytes_per_s": 2 * _COPIED_BYTES / _median_seconds(lambda: target.copy_(source))}


def operations_per_image() -> float:
    """Returns the floating-point operations of the default network's passes of one image, of products only."""
    net, images = build_net(ModelSettings(), num_classes=10, seed=0), torch.randn(2, 1, 28, 28)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(images), torch.tensor([0, 1])).backward()
    return counter.get_total_flops() / len(images)


def _median_seconds(work: Callable[[], object]) -> float:
    durations = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        durations.append(begin.elapsed_time(end) / 1000)
    return statistics.median(durations[_REPEATS // 4 :])


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("product", "copy"))
    print(json.dumps({"product": product, "copy": copy}[parser.parse_args().what]()))


if __name__ == "__main__":
    main()
