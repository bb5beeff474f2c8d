"""LD032: ranks write one file, or do not end."""

from __future__ import annotations

from typing import Any

from lit_mnist.doctor.evidence import Evidence, fault
from lit_mnist.doctor.findings import Finding, Verdict
from lit_mnist.doctor.listing import listed

TITLE = "Ranks write one file, or do not end"
CAUSE = (
    "All ranks write the same path at the same time, and the file is that of whoever comes last, or damaged. "
    "A process group that is not destroyed can hang at exit."
)
FIX = "Write on rank 0, and end the group:\n    if rank == 0: torch.save(...)\n    dist.destroy_process_group()"
THREADS = ("pytorch/pytorch#122358",)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Finds files that are written on more than one rank, and process groups that are not destroyed."""
    return [*_files(evidence), *_groups(evidence)]


def _files(evidence: Evidence) -> list[Finding]:
    writers: dict[str, dict[int, dict[str, Any]]] = {}
    for record in evidence.ranks:
        for event in record.of_kind("save", "open"):
            if event["place"] and (event["kind"] == "save" or event["mode"]):
                writers.setdefault(event["path"], {}).setdefault(record.rank, event)
    shared = {path: events for path, events in writers.items() if len(events) > 1}
    replaced = {path: events for path, events in shared.items() if any(_replaces(event) for event in events.values())}
    for verdict, found in ((Verdict.FAULT, replaced), (Verdict.NOTE, shared)):
        for path, events in found.items():
            ranks = listed([str(rank) for rank in events])
            others = f" (and {len(found) - 1} other files)" if len(found) > 1 else ""
            first = next(iter(events.values()))
            what = "torch.save" if first["kind"] == "save" else f"open(..., {first['mode']!r})"
            message = f"Ranks {ranks} write the same file {evidence.relative(path)}{others} with {what}."
            amount = f"{len(events)} writers"
            place = evidence.relative(first["place"])
            return [Finding("LD032", verdict, message, first["step"], amount=amount, place=place)]
    return []


def _replaces(event: dict[str, Any]) -> bool:
    return event["kind"] == "save" or any(letter in event["mode"] for letter in "wx")


def _groups(evidence: Evidence) -> list[Finding]:
    left = []
    for record in evidence.ranks:
        inits, end = record.of_kind("init_process_group"), record.end
        if inits and end["reached_end"] and not record.of_kind("destroy_process_group", "error"):
            left.append((record.rank, inits[0]))
    if not left:
        return []
    ranks = listed([str(rank) for rank, _ in left])
    event = left[0][1]
    message = f"The process group is not destroyed on rank {ranks}: destroy_process_group is not called before the end."
    place = evidence.relative(event["place"])
    if not event["direct"]:
        # A library has created it, and may destroy it after the doctor's last look.
        return []
    return [fault("LD032", message, place=place)]
