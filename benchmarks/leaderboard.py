"""Trains each recipe with 20 seeds on CPUs, and prints a row for each: seconds, accuracy, and whether ranks matter.

    python -m benchmarks.leaderboard

A row counts if its mean accuracy on the 10,000 test images is at least 99.0 %. Its seconds are those from the start of
the command to its end, so they include imports and the test. `leaderboard.json` beside this file keeps each run: its
command, seconds, and the `result.json` with the configuration, the versions and the digest of the weights. The recipes
run in turn; run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.__main__ import call, machine

SEEDS = 20
RECIPES = ("speedrun", "default")
RANKS = (1, 2)
LOG = Path(__file__).with_name("leaderboard.json")


def main() -> None:
    """Runs all, writes the log after each seed, and prints the table."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for seed in range(SEEDS):
        for recipe in RECIPES:
            for ranks in RANKS:
                print(f"seed {seed}: {recipe} on {ranks}", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    words = ["train.py", "--config", f"configs/{recipe}.yaml", "--devices", ranks, "--seed", seed]
                    seconds, _ = call([*words, "--run-dir", folder], Path(folder))
                    result = json.loads(Path(folder, "result.json").read_text())
                runs[f"{recipe}.yaml, {ranks} rank{'s' * (ranks > 1)}"].append({"seconds": seconds, **result})
        LOG.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    print(table(runs))


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the rows in Markdown, fastest first."""
    lines = ["| recipe | seconds | accuracy | bit-identical on 1 and 2 ranks |", "|---|---|---|---|"]
    digests = {name: [run["weights_sha256"] for run in rows] for name, rows in runs.items()}
    for name, rows in sorted(runs.items(), key=lambda item: statistics.mean(run["seconds"] for run in item[1])):
        seconds = [run["seconds"] for run in rows]
        accuracies = [100 * run["test"]["accuracy"] for run in rows]
        recipe = name.partition(",")[0]
        equal = sum(one == two for one, two in zip(*(digests[each] for each in runs if recipe in each), strict=True))
        lines.append(
            f"| {name} | {statistics.mean(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) "
            f"| {statistics.mean(accuracies):.2f} % ± {statistics.stdev(accuracies):.2f} | {equal} of {len(rows)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
