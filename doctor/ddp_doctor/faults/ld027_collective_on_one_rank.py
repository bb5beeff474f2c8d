"""LD027: a collective runs on one rank only."""

from collections.abc import Sequence

from ddp_doctor.evidence.decisions import stopping_decision
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, epoch_of
from ddp_doctor.evidence.requirements import communicating
from ddp_doctor.findings import Finding, fault
from ddp_doctor.records.run import RankRecord

TITLE = "A collective runs on one rank only"
CAUSE = """\
Every rank must call the same collectives in the same order: a validation, a log or a checkpoint on rank 0 alone breaks
it. Collectives of the same shape then pair up incorrectly, which mixes values, and the hang comes later or never.
"""
WRONG = """\
if dist.get_rank() == 0:
    dist.all_reduce(loss)    # the other ranks do not call it
    print(loss)
"""
FIX = """\
Call collectives on all ranks, restrict only the output to rank 0, and evaluate there with `ddp.module`:
    dist.all_reduce(loss)    # before the condition
In Lightning, log the same keys in the same order on all ranks, if need be with a sum and a count of zero.
"""
THREADS = ("Lightning-AI/pytorch-lightning#19106", "Lightning-AI/pytorch-lightning#21409", "pytorch/pytorch#54059")
EXPLAINS = "weights"
NEEDS = (communicating,)
_KEYS = "Lightning-AI/pytorch-lightning#21409"
_TRAINING = "a training step"
_BACKWARD = "a backward pass"
_BUFFERS = "DistributedDataParallel.forward"


def check(evidence: Evidence) -> list[Finding]:
    """Compares the sequences of collectives of the ranks, including those of a run that hangs."""
    for other in evidence.ranks[1:]:
        first = evidence.ranks[0]
        # If one rank has more batches, it is LD028.
        uneven = _is_uneven(first, other)
        if not uneven and (logs := mixed_keys((first, other))):
            one, two = logs
            message = (
                f"Where a rank logs {one['name']}, another one logs {two['name']} ({evidence.relative(two['place'])}), "
                f"and Lightning reduces the two as one value, which is a known fault of it ({_KEYS})."
            )
            return [fault(message, one["step"], tensor=one["name"], place=one["place"])]
        if (_joins(first) or not uneven) and (found := _mismatch(first, other)):
            # A rank that has stopped alone calls no collective: LD034.
            return [] if stopping_decision(evidence) else [found]
    return []


def mixed_keys(ranks: Sequence[RankRecord]) -> tuple[Event, Event] | None:
    """Returns two logs of other keys whose values Lightning reduces as one."""
    first, *others = map(_reduced, ranks)
    pairs = (pair for other in others for time in first for pair in zip(first[time], other.get(time, ()), strict=False))
    return next((pair for pair in pairs if pair[0]["name"] != pair[1]["name"]), None)


def _reduced(record: RankRecord) -> dict[tuple[bool, bool], list[Event]]:
    """Returns the logs that Lightning reduces, in their order, by whether it does so in training, and at once."""
    found: dict[tuple[bool, bool], list[Event]] = {}
    for event in record.of_kind("log"):
        own = found.setdefault((event["gradients"], event["at_once"]), [])
        # A metric of torchmetrics, which is no number, is reduced as well. An epoch has a mean of each key.
        reduced = event["sync_dist"] or event["value"] is None
        if reduced and (event["at_once"] or event["name"] not in {one["name"] for one in own}):
            own.append(event)
    return found


def _mismatch(first: RankRecord, second: RankRecord) -> Finding | None:
    """Finds the collective with which a rank leaves the common sequence."""
    ranks, sequences = (first, second), [_sequence(record) for record in (first, second)]
    for number in range(max(map(len, sequences))):
        ends = [sequence[number] if number < len(sequence) else ("", {}) for sequence in sequences]
        names = [name for name, _ in ends]
        if names[0] != names[1]:
            # A rank that continues training is not the one that leaves the sequence.
            extra = next((place for place in (0, 1) if names[place] not in {"", _TRAINING, _BACKWARD}), None)
            if extra is None:
                return None
            rank, event, other, name = ranks[extra], ends[extra][1], ranks[1 - extra], names[1 - extra]
            # A rank that has joined waits for the others.
            if not name and not other.end["reached_end"] and not _joins(other):
                return None
            does = f"is in {name}" if name in {_TRAINING, _BACKWARD} else f"calls {name}"
            message = f"Rank {rank.rank} calls {event.get('op', _BUFFERS)}, but rank {other.rank} "
            return fault(f"{message}{does if name else 'has ended or joined'}.", event["step"], place=event["place"])
    return None


def _sequence(record: RankRecord) -> list[tuple[str, Event]]:
    """Returns the collectives of all ranks that a rank has called, in order, with those of DDP."""
    found, reduces = [], False
    joins = _joins(record)
    for event in record.journal:
        if event["kind"] == "collective":
            # A rank that has joined shadows those of libraries in other forms.
            if not event["subgroup"] and (not joins or event["direct"]):
                found.append((event["op"], event))
        elif joins:
            continue
        elif event["kind"] == "backward":
            if reduces:
                found.append((_BACKWARD, event))
            reduces = False
        elif event["gradients"] and event["synchronizes"]:
            found.append((_TRAINING, event))
            reduces = True
        elif event["buffers"] and not event["gradients"]:
            found.append((_BUFFERS, event))
    return found


def _joins(record: RankRecord) -> bool:
    return any(event["kind"] == "join" for event in record.journal)


def _is_uneven(first: RankRecord, second: RankRecord) -> bool:
    """Returns whether a loader has ended on one rank while the other has more batches of the same epoch."""
    one, two = ({epoch_of(event): event for event in record.of_kind("epoch")} for record in (first, second))
    pairs = [(one[key], two[key]) for key in one.keys() & two.keys()]
    return any("sizes" in a and b["yielded"] > a["yielded"] for pair in pairs for a, b in (pair, pair[::-1]))
