"""Measures what the project promises about speed, as ratios, interleaved in one run.

    make bench
    python -m lit_mnist.bench --repeats 9 --json bench.json

1. Start: seconds from the start of `python train.py --devices 2` to the end of its first optimizer step, against
   those of `python -c "import lightning.pytorch"`.
2. Data path: images per second of the Lightning path on one rank, against a bare loop over float tensors in memory
   with the same network, optimizer, batch and threads.
3. Communication: images per second of raw DDP on two ranks at batch 64, and of DDP without synchronised batch norm,
   against two ranks that only keep in step.
4. Stall: how much longer raw DDP's step takes when a checkpoint is saved after every step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lit_mnist.training.measure import WARM_UP_STEPS, commit, spread, versions

BATCH, STEPS = 256, 120
DDP_BATCH, DDP_STEPS = 64, 220
UNITS = {"import": "s", "first step": "s"} | dict.fromkeys(
    ("bare loop", "lightning", "lock-step", "DDP alone", "raw DDP", "raw DDP saving"), "images/s"
)
_BARE_LOOP = """
import statistics, sys, time, torch
import torch.nn.functional as F
from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.loader import normalise
from lit_mnist.data.order import train_indices
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.training.optimizer import make_optimizer

batch, steps, threads, warm_up = map(int, sys.argv[1:])
torch.set_num_threads(threads)
split = load_dataset("mnist", None).train
images, labels = normalise(split.images.unsqueeze(1).float()), split.labels
settings = ModelSettings()
net = build_net(settings, num_classes=10, seed=42)
optimizer = make_optimizer(net, settings)
order = torch.from_numpy(train_indices(42, 0, 0, count=len(split), batch_size=len(split)).copy())
times = []
for step in range(steps):
    start = time.perf_counter()
    chosen = order[step * batch : (step + 1) * batch]
    loss = F.cross_entropy(net(images[chosen]), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
print(batch / statistics.median(times[warm_up:]))
"""


def seconds_to_import() -> float:
    """Returns the seconds that importing Lightning takes, from the process's start to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import lightning.pytorch"], check=True)
    return time.perf_counter() - start


def train(folder: Path, *flags: object, engine: str = "lightning") -> dict[str, object]:
    """Runs a training and returns its result."""
    command = [sys.executable, "-m", f"lit_mnist.engines.{engine}", *map(str, flags), "--run-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((folder / "result.json").read_text()))


def seconds_to_first_step(folder: Path) -> float:
    """Returns the seconds from the start of a training on two ranks to the end of its first step."""
    result = train(folder, "--devices", 2, "--max-steps", 1, "--data.val_size", 0, "--data.test_size", 100)
    return float(str(result["seconds_to_first_step"]))


def lightning_images_per_s(folder: Path, threads: int) -> float:
    """Returns images per second of the Lightning path on one rank."""
    flags = ("--batch-size", BATCH, "--max-steps", STEPS, "--data.val_size", 0, "--data.test_size", 100)
    plain = ("--precision", "32-true", "--trainer.accelerator", "cpu")
    result = train(folder, "--devices", 1, "--run.threads", threads, *plain, *flags)
    return float(result["train"]["images_per_s"])  # type: ignore[index]


def bare_images_per_s(threads: int) -> float:
    """Returns images per second of a bare loop over tensors in memory."""
    command = [sys.executable, "-c", _BARE_LOOP, *map(str, (BATCH, STEPS, threads, WARM_UP_STEPS))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def raw_ddp_images_per_s(folder: Path, *more: object) -> float:
    """Returns images per second of raw DDP on two ranks."""
    flags = ("--batch-size", DDP_BATCH, "--max-steps", DDP_STEPS, "--data.val_size", 0, "--data.test_size", 100)
    plain = ("--precision", "32-true", "--trainer.accelerator", "cpu")
    result = train(folder, "--devices", 2, *plain, *flags, *more, engine="raw_ddp")
    return float(result["train"]["images_per_s"])  # type: ignore[index]


def lockstep_images_per_s(*flags: str) -> float:
    """Returns images per second of two ranks that train by themselves and only keep in step."""
    words = ["--batch-size", str(DDP_BATCH), "--steps", str(DDP_STEPS), *flags]
    command = [sys.executable, "-m", "lit_mnist.lockstep", *words]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measures, prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    threads = max(1, len(os.sched_getaffinity(0)))
    rows: dict[str, list[float]] = {name: [] for name in UNITS}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(options.repeats):
            rows["import"].append(seconds_to_import())
            rows["first step"].append(seconds_to_first_step(Path(scratch) / f"start-{repeat}"))
            rows["bare loop"].append(bare_images_per_s(threads))
            rows["lightning"].append(lightning_images_per_s(Path(scratch) / f"speed-{repeat}", threads))
            rows["lock-step"].append(lockstep_images_per_s())
            rows["DDP alone"].append(lockstep_images_per_s("--ddp"))
            rows["raw DDP"].append(raw_ddp_images_per_s(Path(scratch) / f"ddp-{repeat}"))
            saving = raw_ddp_images_per_s(Path(scratch) / f"saving-{repeat}", "--save-every", 1)
            rows["raw DDP saving"].append(saving)
            print(f"repeat {repeat + 1}/{options.repeats} done", file=sys.stderr)
    table = {name: row for name, values in rows.items() if (row := spread(values))}
    ratios = {
        "first step / import": table["first step"]["median"] / table["import"]["median"],
        "lightning / bare loop": table["lightning"]["median"] / table["bare loop"]["median"],
        "DDP alone / lock-step": table["DDP alone"]["median"] / table["lock-step"]["median"],
        "raw DDP / lock-step": table["raw DDP"]["median"] / table["lock-step"]["median"],
    }
    step, longer = (DDP_BATCH / table[name]["median"] for name in ("raw DDP", "raw DDP saving"))
    ratios["raw DDP saving / raw DDP"] = step / longer
    stall = 1000 * (longer - step)
    for name, row in table.items():
        unit = UNITS[name]
        print(f"{name:<14} {row['median']:10.2f} {unit:<9} from {row['lowest']:.2f} to {row['highest']:.2f}")
    for name, ratio in ratios.items():
        print(f"{name:<24} {ratio:.2f}")
    print(f"a save makes its step {stall:.1f} ms longer")
    report = {
        "stall_ms": stall,
        "repeats": options.repeats,
        "threads": threads,
        "batch_size": BATCH,
        "rows": table,
        "ratios": ratios,
        "versions": versions(),
        "commit": commit(),
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
