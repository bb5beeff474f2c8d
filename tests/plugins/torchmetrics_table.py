"""Writes docs/torchmetrics.md: `python tests/plugins/torchmetrics_table.py`. Needs some optional dependencies."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torchmetrics
from torchmetrics_cases import SAMPLES, classes
from torchmetrics_outcomes import TOLERANCE, Result, compare, installed

PAGE = Path(__file__).parents[2] / "docs/torchmetrics.md"
HEAD = """# torchmetrics on several ranks

What [`exact_metric`](plugins.md#exact_metric) does with each class of torchmetrics {version}. Each was given generated
samples (0, 1 and {samples}) on 2 and on 3 ranks, and compared with one rank, where the same samples are in other
batches. *Equal* means: bit for bit if all states are integers, otherwise within {tolerance:g} (relative or absolute,
for sums of float32 in another order). Without samples, all ranks raise the exception that one process raises.

{equal} classes are equal, {rejected} are rejected before training with the message below, {partly} are equal and
rejected with one argument, and {missing} were not tested, since a dependency or a pretrained network was not installed.
Every class of yours whose states have another reduction than `mean` works the same way; a class that computes with the
number of batches, or draws random numbers, cannot be recognized.

`python tests/plugins/torchmetrics_table.py` writes this page. `make soak` checks it.

| class | result |
|---|---|
"""


def rows(results: dict[str, Result], missing: dict[str, str]) -> dict[str, str]:
    """Returns the row of each class."""
    found = {name: f"| `{name}` | {_text(result)} |" for name, result in results.items()}
    found |= {name: f"| `{name}` | not tested: {_first_sentence(reason)} |" for name, reason in missing.items()}
    return dict(sorted(found.items()))


def _text(result: Result) -> str:
    messages = " ".join(sorted(message.partition(". It cannot")[0] for message in result.rejected))
    if result.different:
        return "**differs**"
    return "; ".join(["equal"] * (result.equal > 0) + [f"rejected: {messages}"] * bool(messages))


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def main() -> None:
    usable, missing = installed(list(classes()))
    with tempfile.TemporaryDirectory() as folder:
        results = compare(usable, Path(folder), (2, 3))
    both = [bool(result.equal) + 2 * bool(result.rejected) for result in results.values()]
    head = HEAD.format(
        version=torchmetrics.__version__,
        samples=SAMPLES,
        tolerance=TOLERANCE,
        equal=both.count(1),
        rejected=both.count(2),
        partly=both.count(3),
        missing=len(missing),
    )
    PAGE.write_text(head + "\n".join(rows(results, missing).values()) + "\n")
    print(f"{PAGE}: {both.count(1)} equal, {both.count(2)} rejected, {both.count(3)} partly, {len(missing)} not tested")


if __name__ == "__main__":
    main()
