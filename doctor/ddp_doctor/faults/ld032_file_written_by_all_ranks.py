"""LD032: ranks write one file, or do not end."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import names
from ddp_doctor.findings import Finding, fault, note
from ddp_doctor.source.file import MEDIUM, Likely, SourceFile, keyword, last, names_in

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


_OWN_PATH = re.compile(r"rank|process_index|getpid|gpu|uuid|tempfile|tmp|BytesIO|buffer", re.IGNORECASE)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds checkpoints that every rank writes to one path."""
    if not file.program.distributed:
        return
    saves = {call: _path(call) for call in file.called("save") if file.name(call.func) == "torch.save"}
    guarded = {ast.unparse(path) for call, path in saves.items() if path and file.guarded_by_rank(call)}
    for call, path in saves.items():
        own = path is None or ast.unparse(path) in guarded or _is_own(file, path)
        if path and not own and _on_every_rank(file, call):
            yield Likely(call, f"every rank writes {ast.unparse(path)}: no condition on the rank is above it.", MEDIUM)


def _path(save: ast.Call) -> ast.expr | None:
    return save.args[1] if len(save.args) > 1 else keyword(save, "f")


def _is_own(file: SourceFile, path: ast.expr) -> bool:
    """Returns whether a path may contain the rank, or belong to a sample that one rank has."""
    parts, scope = [path], file.scope(path)
    targets = [one.target for one in ast.walk(scope) if isinstance(one, ast.For | ast.comprehension)]
    samples = {name for name in names_in(targets) if not re.search("epoch|step|iter", name)}
    for part in parts:
        names = [one for one in ast.walk(part) if isinstance(one, ast.Name | ast.Attribute)]
        parts += [value for one in names for _, value in file.assigned(one) if value not in parts]
    return bool(samples & names_in(parts)) or any(_OWN_PATH.search(ast.unparse(part)) for part in parts)


def _on_every_rank(file: SourceFile, node: ast.AST, seen: tuple[tuple[SourceFile, str], ...] = ()) -> bool:
    """Returns whether a statement is reached without a condition on the rank, and its function so, too."""
    scope, locks = file.scope(node), [one for one in file.above(node) if isinstance(one, ast.With)]
    if file.guarded_by_rank(node) or any("lock" in ast.unparse(one.items[0]).lower() for one in locks):
        return False
    if isinstance(scope, ast.Module):
        # A tool that imports the project's training code has one process.
        return file.communicates or any(one.communicates for one, _ in seen)
    if any(scope.name == name for _, name in seen):
        return False
    uses = [
        (other, one)
        for other in file.program.files
        if scope.name in other.text
        for one in other.nodes
        if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load) and last(one) == scope.name
    ]
    calls = [next(other.above(one)) for other, one in uses]
    if not seen and any(isinstance(one, ast.Call) and _OWN_PATH.search(ast.unparse(one)) for one in calls):
        # The path may be an argument.
        return False
    return bool(uses) and all(_on_every_rank(other, one, (*seen, (file, scope.name))) for other, one in uses)


def check(evidence: Evidence) -> list[Finding]:
    """Finds files that are written on more than one rank, and process groups that are not destroyed."""
    return [*_files(evidence), *_groups(evidence)]


def _files(evidence: Evidence) -> list[Finding]:
    writes = [(record.rank, record.of_kind("save", "open")) for record in evidence.ranks]
    locked = {event["path"] for record in evidence.ranks for event in record.of_kind("lock")}
    # The locks that more than one rank holds when it writes.
    held = Counter(lock for _, events in writes for lock in {lock for event in events for lock in event["locks"]})
    common = {lock for lock, holders in held.items() if holders > 1}
    writers: dict[str, dict[int, dict[str, Any]]] = {}
    for rank, events in writes:
        for event in events:
            # A file that is locked, or written under a lock of all ranks, has one writer at a time.
            alone = event["path"] in locked or common.intersection(event["locks"])
            if event["place"] and not alone and (event["kind"] == "save" or event["mode"]):
                writers.setdefault(event["path"], {}).setdefault(rank, event)
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
    left = [
        (record.rank, record.of_kind("init_process_group")[0])
        for record in evidence.ranks
        if record.of_kind("init_process_group")
        and record.end["reached_end"]
        and not record.of_kind("destroy_process_group", "error")
    ]
    # A library that has created it may destroy it after the doctor's last record.
    if not left or not left[0][1]["direct"]:
        return []
    message = f"destroy_process_group is not called before the end of {names([rank for rank, _ in left])}."
    # The system frees what the group held; a rank that still communicates fails only now and then.
    return [note(message, place=left[0][1]["place"])]
