"""LD008: all ranks draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, calls_of, communicates
from ddp_doctor.findings import Finding, fault, note
from ddp_doctor.listing import listed
from ddp_doctor.records.run import RankRecord

CODE = "LD008"
TITLE = "All ranks draw the same random numbers"
CAUSE = """\
All ranks are seeded equally, which initializes the weights equally. The generator then continues equally. If
the draws decide which data a rank sees, such as noise on samples, augmentations, time steps or negatives, the
variety within a global batch is smaller by the number of ranks. The loss falls, so that only the final quality
shows it. Equal dropout masks alone are a note: they meet different samples.
"""
FIX = """\
Seed by rank after the model is built:
    model = build()
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    random.seed(seed + rank)
In Lightning, in `on_fit_start`: torch.manual_seed(torch.initial_seed() + self.global_rank)
"""
THREADS = ("huggingface/transformers#31412", "ecmwf/anemoi-core#595")
STRUCTURAL = True
# NumPy and Python do not show where their numbers go. At least one per sample is no choice per batch, which takes a
# few words, as mixup does.
_FEW_WORDS = 16


class _Shared(NamedTuple):
    """Draws that two ranks share.

    Attributes:
        generator: `torch`, `NumPy` or `Python`.
        where: `loading`, `workers` or `step`.
        data: Whether they decide which data the ranks see.
        step: The step.
        ranks: The two ranks.
        what: What is drawn.
        place: The user's place of the draw, or empty.
    """

    generator: str
    where: str
    data: bool
    step: int
    ranks: tuple[int, int]
    what: str
    place: str = ""


def check(evidence: Evidence) -> list[Finding]:
    """Compares the states of all generators on all ranks where they are drawn from."""
    if not communicates(evidence):
        return []
    found = sorted(_shared(evidence.ranks), key=lambda shared: not shared.data)
    return [_finding(evidence, found[0])] if found else []


def _finding(evidence: Evidence, shared: _Shared) -> Finding:
    seeds = [
        event
        for event in evidence.ranks[0].of_kind("seed")
        if event["step"] <= shared.step and event["place"] and event["generator"] == shared.generator
    ]
    place = (seeds[-1]["place"] if seeds else "") or shared.place
    message = (
        f"At step {shared.step}, ranks {shared.ranks[0]} and {shared.ranks[1]} draw the same random numbers of "
        f"{shared.generator}, whose generator has the same state on both: {shared.what}."
    )
    if not shared.data:
        message += " It is not seen that they decide which data a rank gets."
        return note(message, shared.step, place=place)
    proof = ""
    if shared.where != "workers":
        run = evidence.run("a seed per rank", interventions={"seeds": 1})
        if run.worked:
            again = any(other.data for other in _shared(run.ranks))
            proof = "" if again else "with another seed per rank from the first batch on, the states differ"
            message += " The program sets this state again and again." if again else ""
    return fault(message, step=shared.step, place=place, proof=proof)


def _shared(ranks: Sequence[RankRecord]) -> Iterator[_Shared]:
    """Yields the draws that two ranks share in more than one step; initial weights must be equal in one."""
    first, *others = ranks
    for other in others:
        for generator in ("torch", "NumPy", "Python"):
            pairs = list(_pairs(first, other, generator))
            numbers = first.rank, other.rank
            for shared in (_loading(pairs, generator, numbers, first), _step(pairs, generator, numbers, first)):
                if shared:
                    yield shared
            if shared := _workers(first, other, generator):
                yield shared


def _pairs(first: RankRecord, other: RankRecord, generator: str) -> Iterator[tuple[Event, Event]]:
    """Yields the training batches of two ranks that differ, except the last ones, whose steps are not complete."""
    batches = [
        {(batch["loader"], batch["iteration"], batch["number"]): batch for batch, _ in pairwise(_training(rank))}
        for rank in (first, other)
    ]
    for key in (key for key in batches[0] if key in batches[1]):
        one, two = batches[0][key], batches[1][key]
        # Ranks that share their samples on purpose share their augmentations, too.
        if one["indices"] != two["indices"] or not one["indices"]:
            yield one, two


def _training(rank: RankRecord) -> list[Event]:
    return [batch for batch in rank.of_kind("batch") if batch["trains"]]


def _loading(
    pairs: Sequence[tuple[Event, Event]], generator: str, ranks: tuple[int, int], record: RankRecord
) -> _Shared | None:
    """Returns the draws with which samples are loaded in this process; the first batch also draws for its sampler."""
    found = [
        one
        for one, two in pairs
        if one["number"] and one["generators"][generator] == two["generators"][generator]
        if all(batch["generators"][generator] != batch["at_step"][generator] for batch in (one, two))
    ]
    if len(found) < 2:
        return None
    epochs = {(epoch["loader"], epoch["iteration"]): epoch for epoch in record.training_epochs}
    epoch = epochs[found[0]["loader"], found[0]["iteration"]]
    calls = calls_of(record, epoch["base"])
    data = bool(calls and calls["random"] and generator in calls["generators"])
    who = f"the {epoch['dataset']}" if data else "the sampler, the stream or the collate_fn"
    what = f"{who} draws them while it loads a batch"
    what += ", so that its augmentations are equal on all ranks" if data else ""
    return _Shared(generator, "loading", data, found[0]["step"], ranks, what, epoch["place"])


def _workers(first: RankRecord, other: RankRecord, generator: str) -> _Shared | None:
    """Returns the draws of workers that begin equally, if the data set draws from this generator."""
    for one, two in zip(first.training_epochs, other.training_epochs, strict=False):
        calls = calls_of(first, one["base"])
        if one["indices"] == two["indices"] or not (calls and calls["random"] and generator in calls["generators"]):
            continue
        states = zip(one["worker_generators"], two["worker_generators"], strict=False)
        if any(a[generator] == b[generator] for a, b in states):
            what = f"the {one['dataset']} draws them in its workers, so that its augmentations are equal on all ranks"
            return _Shared(generator, "workers", True, one["step"], (first.rank, other.rank), what, one["place"])
    return None


def _step(
    pairs: Sequence[tuple[Event, Event]], generator: str, ranks: tuple[int, int], record: RankRecord
) -> _Shared | None:
    equal = [one for one, two in pairs if one["at_step"][generator] == two["at_step"][generator]]
    if generator == "torch":
        drawn = [batch for batch in equal if batch["drawn"] > 1 and _changes(record, batch)]
        return _of_torch(drawn, ranks, record) if len(drawn) > 1 else None
    drawn = [batch for batch in equal if batch["hidden"].get(generator)]
    if len(drawn) < 2:
        return None
    words, size = min((batch["hidden"][generator], batch["size"]) for batch in drawn)
    data = words >= size and words > _FEW_WORDS
    what = f"the step draws about {words} numbers for the {size} samples of its batch"
    return _Shared(generator, "step", data, drawn[0]["step"], ranks, what, drawn[0]["place"])


def _of_torch(drawn: Sequence[Event], ranks: tuple[int, int], record: RankRecord) -> _Shared:
    into = [(batch, draw) for batch in drawn for draw in batch["flows"] if draw["into"] == "data"]
    if into:
        batch, draw = into[0]
        names = listed(list(dict.fromkeys(f"torch.{draw['op']}" for other, draw in into if other is batch)))
        what = f"{names} decides which samples or inputs the model gets"
        return _Shared("torch", "step", True, batch["step"], ranks, what, draw["place"])
    random = sorted({name for event in record.of_kind("forward") for name in event["random"]})
    what = f"{listed(random)} drops the same values" if random else f"{drawn[0]['drawn']} values within the model"
    return _Shared("torch", "step", False, drawn[0]["step"], ranks, what, drawn[0]["place"])


def _changes(record: RankRecord, batch: Event) -> bool:
    """Returns whether the step after a batch changes torch's generator, as the next batch shows."""
    batches = _training(record)
    later = batches[batches.index(batch) + 1]
    return bool(later["generators"]["torch"] != batch["at_step"]["torch"])
