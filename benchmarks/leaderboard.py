"""Trains `configs/speedrun.yaml` with 20 seeds, on one rank and on two in turn, and prints seconds and accuracy.

    python -m benchmarks.leaderboard

Seconds are those from the start of the command to its end, with imports and the test on 10,000 images. Run nothing
else on the machine meanwhile. `leaderboard.jsonl` beside this file keeps what was used, and each run.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.__main__ import call, machine

SEEDS = 20
LOG = Path(__file__).with_name("leaderboard.jsonl")


def main() -> None:
    """Trains all, writes the log, and prints the table."""
    used, runs = machine(), list[dict[str, Any]]()
    for seed, ranks in ((seed, ranks) for seed in range(SEEDS) for ranks in (1, 2)):
        print(f"seed {seed} on {ranks}", file=sys.stderr, flush=True)
        words = ["train.py", "--config", "configs/speedrun.yaml", "--devices", ranks, "--seed", seed]
        with tempfile.TemporaryDirectory() as folder:
            seconds, _ = call([*words, "--run-dir", folder], Path(folder))
            result = json.loads(Path(folder, "result.json").read_text())
        used |= {name: result[name] for name in ("versions", "precision", "commit")}
        row = {"seed": seed, "ranks": ranks, "seconds": round(seconds, 2), "accuracy": result["test"]["accuracy"]}
        runs.append(row | {"weights_sha256": result["weights_sha256"]})
    LOG.write_text("\n".join(map(json.dumps, [used, *runs])) + "\n")
    print_table(runs)


def print_table(runs: list[dict[str, Any]]) -> None:
    """Prints the mean of the runs on one rank and on two, and how many seeds gave the same weights."""
    for ranks in (1, 2):
        seconds, accuracies = ([run[key] for run in runs if run["ranks"] == ranks] for key in ("seconds", "accuracy"))
        told = f"{statistics.mean(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
        print(f"{ranks}: {told}, {statistics.mean(accuracies):.2%} ± {statistics.stdev(accuracies):.2%}")
    print(f"bit-identical on 1 and 2 ranks: {2 * SEEDS - len({run['weights_sha256'] for run in runs})} of {SEEDS}")


if __name__ == "__main__":
    main()
