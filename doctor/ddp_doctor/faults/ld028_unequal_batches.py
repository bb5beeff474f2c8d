"""LD028: ranks have unequal numbers of batches."""

from collections.abc import Sequence

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, training_epochs
from ddp_doctor.evidence.requirements import communicating, need, training_loader
from ddp_doctor.findings import Finding, cannot_tell, fault, not_applicable, unclear
from ddp_doctor.records.run import RankRecord

TITLE = "Ranks have unequal numbers of batches"
CAUSE = """\
A stream, a filter or an early stop can give one rank fewer batches: the others wait in their next all-reduce until the
timeout, or collectives of different steps pair up.
"""
WRONG = """\
shards = files[rank::world_size]    # 5 files on 2 ranks: one rank has more batches
for batch in read(shards):
    step(ddp, batch)    # its last all-reduce waits forever
"""
FIX = """\
Make the numbers equal, or let DDP handle the rest:
    with Join([ddp]):    # torch.distributed.algorithms.join
        for batch in loader: ...
Reduce a decision to stop, so that all ranks take it in the same step.
"""
THREADS = ("pytorch/pytorch#141069", "Lightning-AI/pytorch-lightning#18023", "Lightning-AI/pytorch-lightning#379")
EXPLAINS = "weights"
# A program with up to this many batches is run to the end of an epoch.
_MOST_BATCHES = 50
_SECONDS = 10.0


def check(evidence: Evidence) -> list[Finding]:
    """Compares the numbers of batches; a loop that ends earlier by itself is no fault."""
    ranks = evidence.ranks
    # The loop of an endless stream ends by itself, on all ranks at the same step.
    endless = {event["loader"] for rank in ranks for event in rank.training_epochs if event.get("endless")}
    for events in training_epochs(ranks):
        known = [count for event in events if (count := _batches(event)) is not None]
        if len(known) < len(events) or len(set(known)) == 1 or {event["loader"] for event in events} & endless:
            continue
        counts = ", ".join(f"{count} on rank {rank.rank}" for count, rank in zip(known, ranks, strict=True))
        message = f"Epoch {events[0].get('epoch', 0)} has unequal numbers of batches: {counts}."
        where = None, "", counts, events[0]["place"]
        ended = _ended(ranks)
        if not ended and max(known) <= _MOST_BATCHES:
            seconds = min(evidence.spec.timeout, _SECONDS + 2 * evidence.runs["ranks"].seconds)
            run = evidence.run("epoch to its end", steps=max(known) + 1, timeout=seconds)
            ended = _ended(run.ranks)
            if not ended and run.worked:
                # The loop ends before the shortest loader does.
                return []
        elif not ended and not any(rank.of_kind("trainer") for rank in ranks):
            # A Trainer takes all batches.
            return [unclear(f"{message} Whether the loop ends before the first of them was not seen.", *where)]
        return [fault(f"{message} {ended or 'The ranks with more of them hang or fail.'}", *where)]
    return []


def _batches(event: Event) -> int | None:
    if event["iterable"]:
        return event["yielded"] if event["drained"] else None
    return len(event["sizes"]) if event["drained"] and event.get("sizes") else event["batches"]


def _ended(ranks: Sequence[RankRecord]) -> str:
    """Returns which rank came to the end of its batches while another continued; nothing if there is none."""
    for events in training_epochs(ranks):
        for ended, rank in zip(events, ranks, strict=True):
            longer = [other for other, event in zip(ranks, events, strict=True) if event["yielded"] > ended["yielded"]]
            if ended["complete"] and longer:
                return f"Rank {rank.rank} was at the end of its batches, and rank {longer[0].rank} was not."
    return ""


_join = need(
    lambda evidence: not any(rank.of_kind("join") for rank in evidence.ranks),
    not_applicable("The program trains with Join, which is made for unequal numbers of batches."),
)
_known_counts = need(
    lambda evidence: any(None not in map(_batches, events) for events in training_epochs(evidence.ranks)),
    cannot_tell("The numbers of batches are not known, because the examination ends before the stream does."),
)
NEEDS = (_join, communicating, training_loader, _known_counts)
