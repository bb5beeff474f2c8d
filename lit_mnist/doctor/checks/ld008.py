"""LD008: all ranks draw the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lit_mnist.doctor.evidence import Evidence, fault
from lit_mnist.doctor.findings import Finding
from lit_mnist.doctor.order import Event, communicates
from lit_mnist.doctor.records import RankRecord

TITLE = "All ranks draw the same random numbers"
CAUSE = """\
All ranks are seeded equally, which initializes the weights equally. The generator then continues equally:
dropout masks, noise and augmentations are the same on every rank. The randomness within a global batch is
smaller by the number of ranks. The loss falls, so that only the final quality shows it.
"""
FIX = """\
Seed by rank after the model is built:
    model = build()
    torch.manual_seed(seed + rank)
In Lightning, in `on_fit_start`: torch.manual_seed(torch.initial_seed() + self.global_rank)
"""
THREADS = (
    "huggingface/transformers#31412",
    "ecmwf/anemoi-core#595",
)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Compares the state of torch's generator on all ranks in the steps that draw from it."""
    found = _equal(evidence.ranks)
    if found is None or not communicates(evidence):
        return []
    batch, ranks = found
    random = sorted({name for event in evidence.ranks[0].of_kind("forward") for name in event["random"]})
    where = f" ({', '.join(random[:3])})" if random else ""
    message = (
        f"At step {batch['step']}, ranks {ranks[0]} and {ranks[1]} draw the same random numbers{where}: torch's "
        f"generator has the same state on both, and the step draws {batch['drawn']} values at once."
    )
    run = evidence.run("a seed per rank", interventions={"seeds": 1})
    proof = ""
    if run.worked:
        again = _equal(run.ranks) is not None
        proof = "" if again else "with another seed per rank from the first batch on, the states differ in all steps"
        message += " The program sets this state again and again." if again else ""
    seeds = [event for event in evidence.ranks[0].of_kind("seed") if event["step"] <= batch["step"] and event["place"]]
    place = (seeds or [batch])[-1]["place"]
    return [fault("LD008", message, step=batch["step"], place=evidence.relative(place), proof=proof)]


def _equal(records: Sequence[RankRecord]) -> tuple[Event, tuple[int, int]] | None:
    """Returns the first batch at which two ranks draw the same numbers, with the ranks."""
    seen: dict[tuple[int, int, int, str], int] = {}
    found: list[tuple[Event, tuple[int, int]]] = []
    for rank in records:
        batches = [batch for batch in rank.of_kind("batch") if batch["trains"]]
        for batch, later in pairwise(batches):
            state = batch["generators"]["torch"]
            if batch["drawn"] < 2 or later["generators"]["torch"] == state:
                continue
            key = batch["loader"], batch["iteration"], batch["number"], state
            if key in seen:
                found.append((batch, (seen[key], rank.rank)))
            seen.setdefault(key, rank.rank)
    # One step alone may draw initial weights, which must be equal.
    return found[0] if len(found) > 1 else None
