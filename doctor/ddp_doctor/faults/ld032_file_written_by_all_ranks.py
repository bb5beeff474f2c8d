"""LD032: ranks write one file, or do not end."""

from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import names
from ddp_doctor.findings import Finding, fault, note

TITLE = "Ranks write one file, or do not end"
CAUSE = """\
Code that saves without a test of the rank runs on every rank, so that a file may be a mixture that cannot be read. A
process group that is not destroyed can end while another rank still communicates.
"""
WRONG = """\
torch.save(model.state_dict(), 'model.pt')    # by all ranks at the same time
"""
FIX = """\
Write on rank 0, to a temporary name first, and destroy the group at the end:
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.destroy_process_group()
"""
THREADS = ("huggingface/transformers#28015", "pytorch/pytorch#126275", "NVIDIA/apex#886")


def check(evidence: Evidence) -> list[Finding]:
    """Finds files that are written on more than one rank, and process groups that are not destroyed."""
    return [*_files(evidence), *_groups(evidence)]


def _files(evidence: Evidence) -> list[Finding]:
    locked = {event["path"] for record in evidence.ranks for event in record.of_kind("lock")}
    writers: dict[str, dict[int, dict[str, Any]]] = {}
    for record in evidence.ranks:
        for event in record.of_kind("save", "open"):
            # A file that is locked, or written under a lock, has one writer at a time.
            alone = event["path"] in locked or event["locks"]
            if event["place"] and not alone and (event["kind"] == "save" or event["mode"]):
                writers.setdefault(event["path"], {}).setdefault(record.rank, event)
    shared = {path: found for path, found in writers.items() if len(found) > 1}
    replaced = {path: found for path, found in shared.items() if any(map(_replaces, found.values()))}
    for verdict, files in ((fault, replaced), (note, shared)):
        for path, found in files.items():
            first = next(iter(found.values()))
            others = f" (and {len(files) - 1} other files)" if len(files) > 1 else ""
            message = f"{names([*found]).capitalize()} write the same file {evidence.relative(path)}{others}."
            return [verdict(message, first["step"], place=first["place"])]
    return []


def _replaces(event: dict[str, Any]) -> bool:
    """Returns whether a file gets a new content.

    The options of a run, which Hydra writes on each rank, and the state that `Accelerator.save_state` writes, which has
    to be called on each rank, are equal on all of them.
    """
    path, _, function = event.get("by", "").rpartition(":")
    if ".hydra" in Path(event["path"]).parts or (function == "save_state" and "accelerate" in Path(path).parts):
        return False
    return event["kind"] == "save" or "w" in event["mode"]


def _groups(evidence: Evidence) -> list[Finding]:
    ended = [record for record in evidence.ranks if record.end["reached_end"]]
    left = [record for record in ended if not record.of_kind("destroy_process_group", "error")]
    created = [event for record in left for event in record.of_kind("init_process_group")]
    # A library that has created it may destroy it after the doctor's last record.
    if not created or not created[0]["direct"]:
        return []
    message = f"destroy_process_group is not called before the end of {names([record.rank for record in left])}."
    # The system frees what the group held; a rank that still communicates fails only now and then.
    return [note(message, place=created[0]["place"])]
