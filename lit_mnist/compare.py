"""Trains one experiment with several engines, and compares the weights after every step, the metrics and the speed.

    python train.py compare --engines lightning raw_ddp fabric accelerate hf_trainer --devices 2 --max-steps 30

The engines run one after the other, each in a process of its own. The first is the reference. On a CPU, `data_parallel`
is one process, whose rounding differs from that of several ranks.
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import zlib
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.optim.optimizer import register_optimizer_step_post_hook

from lit_mnist.errors import InputError
from lit_mnist.models import make_net
from lit_mnist.run import new_run_dir

ENGINES = {
    "lightning": "lit_mnist.cli",
    "raw_ddp": "lit_mnist.raw_ddp",
    "fabric": "lit_mnist.engines.fabric",
    "accelerate": "lit_mnist.engines.accelerate",
    "hf_trainer": "lit_mnist.engines.hf_trainer",
    "parameter_server": "lit_mnist.engines.parameter_server",
    "data_parallel": "lit_mnist.engines.data_parallel",
}
# Digests of the weights of rank 0: a line for each step, a number for each tensor.
_STEPS = "steps.jsonl"


def main(words: list[str]) -> None:
    """Runs the command.

    Raises:
        SystemExit: The weights differ (1), or an engine has failed, with its exit code.
    """
    parser = argparse.ArgumentParser("train.py compare", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["raw_ddp", "lightning"], help="the engines")
    parser.add_argument("--run-dir", type=Path, help="the folder of their run folders")
    parser.epilog = "All other options are those of `python train.py`."
    arguments, options = parser.parse_known_args(words)
    engines = list(dict.fromkeys(arguments.engines))
    if len(engines) < 2:
        raise InputError("--engines: give at least two engines to compare.")
    folder = arguments.run_dir or new_run_dir("compare")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--run-dir: {folder} is not empty. Choose another one.")
    for engine in engines:
        print(f"--- {engine}", flush=True)
        process = get_context("fork").Process(target=_train, args=(engine, options, folder / engine))
        process.start()
        process.join()
        if process.exitcode:
            print(f"{engine} has failed", file=sys.stderr)
            sys.exit(process.exitcode if process.exitcode > 0 else 3)
    results = {engine: json.loads((folder / engine / "result.json").read_text()) for engine in engines}
    steps = {engine: _read_steps(folder / engine) for engine in engines}
    reference, *others = engines
    differences = {
        engine: _first_difference(steps[reference], steps[engine], results[reference], results[engine])
        for engine in others
    }
    Console().print(_table(results, differences))
    for engine, difference in differences.items():
        print(f"{engine}: {difference or 'bit-identical'} ({len(steps[engine])} steps, against {reference})")
    if any(differences.values()):
        sys.exit(1)


def _train(engine: str, options: list[str], folder: Path) -> None:
    """Trains with an engine in this process and the ranks that it forks, which inherit the hook."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it does not outlive the comparison

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        digests = [zlib.crc32(tensor.detach().cpu().contiguous().numpy()) for tensor in tensors]
        with (folder / _STEPS).open("a") as file:
            file.write(f"{json.dumps(digests)}\n")

    register_optimizer_step_post_hook(record)
    words = [*options, "--run-dir", str(folder)]
    sys.argv = [engine, *words]
    importlib.import_module(ENGINES[engine]).main(words)


def _read_steps(folder: Path) -> list[list[int]]:
    path = folder / _STEPS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _first_difference(
    expected: list[list[int]], found: list[list[int]], reference: dict[str, Any], result: dict[str, Any]
) -> str | None:
    """Returns where the weights of two runs first differ, or None."""
    names = [name for name, _ in make_net(reference["config"]["model"]["init_args"]["net"]).named_parameters()]
    for step, (one, other) in enumerate(zip(expected, found, strict=False), start=1):
        if differing := [name for name, a, b in zip(names, one, other, strict=True) if a != b]:
            return f"differs from step {step}, first in {differing[0]} ({len(differing)} of {len(names)} tensors)"
    if len(expected) != len(found):
        return f"has made {len(found)} steps instead of {len(expected)}"
    if reference["weights_sha256"] != result["weights_sha256"]:
        return "has equal parameters, but other buffers after the last step"
    return None


def _table(results: dict[str, Any], differences: dict[str, str | None]) -> Table:
    first = next(iter(results.values()))
    columns = ("engine", "ranks", "weights", "test accuracy", "test loss", "images/s", "s")
    table = Table(*columns, title=f"{first['steps']} steps, {first['device']}, {first['precision']}")
    for engine, result in results.items():
        train, test = result["train"], result["test"]
        table.add_row(
            engine,
            str(result["world_size"]),
            "reference" if engine not in differences else "differ" if differences[engine] else "equal",
            f"{test['accuracy']:.2%}",
            f"{test['loss']:.4f}",
            f"{train['images_per_s']:,.0f}" if train["images_per_s"] else "",
            f"{train['seconds']:.1f}",
        )
    return table
