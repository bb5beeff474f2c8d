"""Trains recipes with 20 seeds, each on one rank and on two: seconds, accuracy, and whether the ranks matter.

    python -m benchmarks.leaderboard

Seconds are those from the start of the command to its end, with imports and the test on 10,000 images. The runs take
turns; run nothing else on the machine meanwhile. `leaderboard.json` beside this file keeps each run.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.__main__ import call, machine

SEEDS = 20
RECIPES = ("speedrun",)
LOG = Path(__file__).with_name("leaderboard.json")


def main() -> None:
    """Trains all, writes the log after each seed, and prints the table."""
    runs: dict[str, list[dict[str, Any]]] = {f"{recipe}, {ranks}": [] for recipe in RECIPES for ranks in (1, 2)}
    common: dict[str, Any] = machine()
    for seed in range(SEEDS):
        for name, rows in runs.items():
            print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
            recipe, ranks = name.split(", ")
            words = ["train.py", "--config", f"configs/{recipe}.yaml", "--devices", ranks, "--seed_everything", seed]
            with tempfile.TemporaryDirectory() as folder:
                seconds, _ = call([*words, "--run-dir", folder], Path(folder))
                result = json.loads(Path(folder, "result.json").read_text())
            common |= {name: result[name] for name in ("versions", "precision", "commit")}
            accuracy, weights = result["test"]["accuracy"], result["weights_sha256"]
            rows.append({"seconds": round(seconds, 2), "accuracy": round(accuracy, 6), "weights_sha256": weights})
        LOG.write_text(json.dumps(common | {"runs": runs}, indent=1) + "\n")
    print("| recipe, ranks | seconds | accuracy | bit-identical on 1 and 2 ranks |\n|---|---|---|---|")
    for name, rows in runs.items():
        seconds, accuracies = ([row[key] for row in rows] for key in ("seconds", "accuracy"))
        weights = [[row["weights_sha256"] for row in runs[f"{name[:-1]}{ranks}"]] for ranks in (1, 2)]
        print(
            f"| {name} | {statistics.mean(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) "
            f"| {statistics.mean(accuracies):.2%} ± {statistics.stdev(accuracies):.2%} "
            f"| {sum(one == two for one, two in zip(*weights, strict=True))} of {SEEDS} |"
        )


if __name__ == "__main__":
    main()
