"""LD032: ranks write one file, or do not end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, Verdict, fault
from ddp_doctor.listing import listed
from ddp_doctor.records.run import RankRecord

CODE = "LD032"
TITLE = "Ranks write one file, or do not end"
CAUSE = """\
Code that saves without a test of the rank runs on every rank. The ranks truncate and write one file at the
same time, and the checkpoint may be a mixture that cannot be read. A process group that is not destroyed can
end while another rank still communicates, which fails only now and then.
"""
FIX = """\
Write on rank 0, and destroy the group at the end:
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.destroy_process_group()
Write to a temporary name first, and rename.
"""
THREADS = ("huggingface/transformers#28015", "pytorch/pytorch#126275", "NVIDIA/apex#886")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Finds files that are written on more than one rank, and process groups that are not destroyed."""
    return [*_files(evidence), *_groups(evidence)]


def _files(evidence: Evidence) -> list[Finding]:
    writers: dict[str, dict[int, dict[str, Any]]] = {}
    locks = {event["path"] for record in evidence.ranks for event in record.of_kind("lock")}
    common = _common_locks(evidence.ranks)
    for record in evidence.ranks:
        for event in record.of_kind("save", "open"):
            # A file that is locked, or written under a lock of all ranks, has one writer at a time.
            alone = event["path"] in locks or common.intersection(event["locks"])
            if event["place"] and not alone and (event["kind"] == "save" or event["mode"]):
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
            place = first["place"]
            return [Finding(CODE, verdict, message, first["step"], amount=amount, place=place)]
    return []


def _common_locks(ranks: Sequence[RankRecord]) -> set[str]:
    """Returns the locks that more than one rank holds when it writes."""
    of_rank = [{lock for event in rank.of_kind("save", "open") for lock in event["locks"]} for rank in ranks]
    held = Counter(lock for locks in of_rank for lock in locks)
    return {lock for lock, holders in held.items() if holders > 1}


def _replaces(event: dict[str, Any]) -> bool:
    return event["kind"] == "save" or "w" in event["mode"]


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
    place = event["place"]
    if not event["direct"]:
        # A library has created it, and may destroy it after the doctor's last look.
        return []
    return [fault(message, place=place)]
