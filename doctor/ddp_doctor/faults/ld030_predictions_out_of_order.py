"""LD030: predictions are partial or out of order."""

from collections.abc import Sequence

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, predictions
from ddp_doctor.findings import Finding, cannot_tell, fault, not_reached
from ddp_doctor.records.run import RankRecord

TITLE = "Predictions are partial or out of order"
CAUSE = """\
Each rank predicts only its part, which a sampler has interleaved and padded: a file of rank 0 has one part, and parts
put one after the other are in the wrong order. The number of rows may still be right.
"""
WRONG = """\
predictions = torch.cat([model(batch) for batch in loader])
torch.save(predictions, 'predictions.pt')    # those of one rank, in the order of its sampler
"""
FIX = """\
Save the index with each prediction, and sort, in Lightning by a `BasePredictionWriter` with `batch_indices`:
    order = torch.cat(indices).argsort()
    predictions = torch.cat(parts)[order][: len(dataset)]
"""
THREADS = ("Lightning-AI/pytorch-lightning#5257", "Lightning-AI/pytorch-lightning#10618")


def check(evidence: Evidence) -> list[Finding]:
    """Compares the samples of the predictions with the data set, and finds ranks whose predictions are lost."""
    events = [event for rank in evidence.trained for event in rank.of_kind("predict")]
    if not events:
        return [not_reached("No Trainer of Lightning predicts.")] if evidence.trained else []
    if reason := next((event["error"] for event in events if event["error"]), ""):
        return [cannot_tell(f"The prediction on several ranks fails ({reason}), so it was not examined.")]
    epochs = predictions(evidence.ranks)
    if not epochs:
        return [cannot_tell("The prediction on several ranks uses no DataLoader.")]
    for events in epochs:
        known = all(event["drained"] and not event["iterable"] for event in events)
        # Each rank may predict all samples.
        same = all(event["indices"] == events[0]["indices"] for event in events) and events[0]["ascending"]
        if known and not same and (found := _order(evidence.ranks, events) or _lost(evidence.ranks, events)):
            return [found]
    return []


def _order(ranks: Sequence[RankRecord], events: list[Event]) -> Finding | None:
    """Returns the finding of samples that are repeated, missing or out of order; none if the outputs name them."""
    total, union = sum(len(event["indices"]) for event in events), {i for event in events for i in event["indices"]}
    faults = []
    if total > len(union):
        faults.append(f"{total - len(union)} of the {len(union)} samples are predicted twice")
    if shuffled := [rank.rank for rank, event in zip(ranks, events, strict=True) if not event["ascending"]]:
        faults.append(f"the predictions of rank {shuffled[0]} are out of order")
    size = events[0]["samples"]
    if size is not None and events[0]["base"] == events[-1]["base"] and 0 < len(union) < size:
        faults.append(f"{size - len(union)} of {size} samples are not predicted")
    if not faults or all(map(_says_indices, ranks, events)):
        return None
    message = f"By the {(events[0]['set_epoch'] or [events[0]['sampler']])[0]}, {'; '.join(faults)}."
    return fault(message, amount=f"{total} predictions for {size} samples", place=events[0]["place"])


def _says_indices(rank: RankRecord, event: Event) -> bool:
    """Returns whether the numbers that a prediction returns first are the indices of the samples."""
    return [number for one in rank.of_kind("predict") for number in one["first"]] == event["indices"]


def _lost(ranks: Sequence[RankRecord], events: list[Event]) -> Finding | None:
    """Returns the finding of predictions that one rank writes, without having got those of the others."""
    later = [rank.events[rank.events.index(rank.of_kind("predict")[0]) :] for rank in ranks]
    collectives = [event for own in later for event in own if event["kind"] == "collective"]
    gathered = any(event["place"] and event["op"] != "barrier" for event in collectives)
    # A report or a file of metrics has another number of rows than the rank has predictions.
    written = {
        rank.rank: event
        for rank, own, known in zip(ranks, events, later, strict=True)
        for event in known
        if event["place"] and len(own["indices"]) in event.get("rows", ())
    }
    if gathered or len(written) != 1:
        return None
    ((writer, event),) = written.items()
    own, total = len(events[writer]["indices"]), sum(len(one["indices"]) for one in events)
    message = f"Rank {writer} alone writes predictions, and the ranks exchange none: those of the others are lost."
    return fault(message, amount=f"{own} of {total} predictions", place=event["place"])
