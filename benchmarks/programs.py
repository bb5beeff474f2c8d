"""Runs each measured program in a separate process, and reads its results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError

_TIMEOUT_S = 1800
_ROOT = str(Path(__file__).parents[1])
# The program that users run, by path: a measurement runs in a folder of its own.
TRAIN = Path(_ROOT) / "train.py"
# Enough for a median after the warm-up; no validation, and a short test.
STEPS = 120
SHORT = ("--data.val_size", 0, "--data.test_size", 100, "--trainer.accelerator", "cpu")


def run_python(*words: object, folder: Path, gpus: bool = False) -> str:
    """Runs the interpreter with some arguments in a folder, and returns its standard output.

    Args:
        words: The arguments.
        folder: The folder.
        gpus: Whether it sees this machine's GPUs.

    Raises:
        InputError: It ended with another exit code than 0; the message has its last lines.
    """
    command = [sys.executable, *map(str, words)]
    # The process runs in another folder: this checkout's packages, which need not be installed, are found by path.
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if not gpus:
        # All of them on the processor: what is compared must compute on the same device.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"A measurement took more than {_TIMEOUT_S} s: {' '.join(command)}") from error
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        if done.returncode == -signal.SIGKILL:
            last += "\nIt was killed, most likely by the kernel because the memory was full."
        raise InputError(f"A measurement ended with exit code {done.returncode}: {' '.join(command)}\n{last}")
    return done.stdout


def wall_seconds(words: Sequence[object], folder: Path) -> dict[str, float]:
    """Returns as `seconds` the time from the start of the interpreter with some arguments to its end."""
    start = time.perf_counter()
    run_python(*words, folder=folder)
    return {"seconds": time.perf_counter() - start}


def printed_numbers(*words: object, folder: Path, gpus: bool = False) -> dict[str, float]:
    """Returns the numbers that a program prints as JSON in its last line; the arguments are those of `run_python`."""
    last = run_python(*words, folder=folder, gpus=gpus).strip().splitlines()[-1]
    return {name: float(value) for name, value in json.loads(last).items()}


def printed(words: Sequence[object], folder: Path) -> dict[str, float]:
    """As `printed_numbers`, with the arguments as one value."""
    return printed_numbers(*words, folder=folder)


def train(folder: Path, *flags: object, engine: str = "lightning", gpus: bool = False) -> dict[str, Any]:
    """Runs a training in a folder, and returns the content of its `result.json`."""
    program = (TRAIN,) if engine == "lightning" else ("-m", f"lit_mnist.engines.{engine}")
    run_python(*program, *flags, "--run-dir", folder / "run", folder=folder, gpus=gpus)
    return result_of(folder)


def short_run(engine: str, ranks: int, flags: Sequence[object], folder: Path, steps: int = STEPS) -> dict[str, float]:
    """Trains some steps on processors, and returns the images per second and the memory of all ranks in bytes."""
    result = train(folder, "--devices", ranks, "--max-steps", steps, *SHORT, *flags, engine=engine)
    return {
        "images_per_s": float(result["train"]["images_per_s"]),
        "memory_bytes": float(result["peak_memory_bytes"]),
    }


def result_of(folder: Path) -> dict[str, Any]:
    """Returns the content of the `result.json` of the run in a folder."""
    return dict(json.loads((folder / "run" / "result.json").read_text()))


def launch_ranks(work: Callable[[Rank], None], ranks: int) -> None:
    """Runs the work of each rank on this machine, without restarts, and keeps no logs.

    Raises:
        LitMnistError: A rank failed.
    """
    # Here, since most measurements start other programs and need no torch.
    from lit_mnist.distributed.launcher import launch

    with tempfile.TemporaryDirectory() as logs:
        launch(work, world_size=ranks, max_restarts=0, logs=Path(logs))
