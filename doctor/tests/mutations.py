"""Injects faults into the healthy programs of the suite by changing their source, and counts those that are found.

python tests/mutations.py               all that were not examined, which takes many hours on two cores
python tests/mutations.py set_epoch     those whose names contain one of the words, again
python tests/mutations.py --most 120    the first 120 of the order
python tests/mutations.py --table       writes the results so far into docs/proof.md

Each mutant is examined by all checks. The order is that of a fixed seed: first one program of every kind with every
fault, then a second one, and so on. On a busy machine, DOCTOR_TIMEOUT gives the runs of an examination more seconds
than 60.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from not_found import EQUIVALENT, MISSED, OTHER_CODE
from projects.cases import CASES, FAMILIES, Case
from suite import PAGE, examine_case

RESULTS = Path(__file__).with_name("doctor-mutations.json")
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"
SEED = 0
REPORTED = {"fault", "depends on the number of devices"}


@dataclass(frozen=True)
class Mutation:
    """A fault, as a change of the source.

    Attributes:
        name: What is changed.
        codes: The codes of which one should report it.
        changes: Patterns, and what replaces them.
        needs: The pattern of a text without which the fault has no effect in a program.
        without: Texts with which the changed program would not run, or be no fault.
        note: Whether a note says what is wrong, as for equal dropout masks.
    """

    name: str
    codes: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    needs: str = ""
    without: tuple[str, ...] = ()
    note: bool = False

    def apply(self, program: str) -> str:
        """Returns the changed program; it is the same if it cannot have the fault."""
        if re.search(self.needs, program) and not any(word in program for word in self.without):
            for old, new in self.changes:
                program = re.sub(old, new, program, flags=re.MULTILINE)
        return program


def _removed(call: str) -> tuple[str, str]:
    """Removes the statements that are this call."""
    return rf"^( *)\S*{call}\(.*\)$", r"\1pass"


def _scaled(factor: str) -> tuple[tuple[str, str], ...]:
    """Scales what is differentiated, or what a training step returns."""
    return (
        (r"^( *)(\S.*)\.backward\(\)$", rf"\1((\2) {factor}).backward()"),
        (r"backward\((.+)\)$", rf"backward((\1) {factor})"),
        (r"^(    def training_step.*\n(?:(?: {8}.*)?\n)*? {8}return) (\w.*)$", rf"\1 (\2) {factor}"),
    )


# Also in a program that starts no process group on one process.
_GROUP = "torch.distributed.is_initialized()"
_RANKS = f"(torch.distributed.get_world_size() if {_GROUP} else 1)"
_IF_RANK_0 = f"if not {_GROUP} or torch.distributed.get_rank() == 0:"
_CLIP = r"torch.nn.utils.clip_grad_norm_([value for group in \2.param_groups for value in group['params']], 1e-3)"
_NO_EPOCH = _removed(r"\.set_epoch")
_NO_SAMPLER = r"\bDistributedSampler\((\w+(?:\(\w*\))?)[^()]*\)", r"torch.utils.data.RandomSampler(\1)"
_ONE_SEED = r"\b(seed\w*|manual_seed)\((?:[^()]|\(\))*rank(?:[^()]|\(\))*\)", r"\1(1000)"
_DRAWS = r"[Dd]ropout|rand\w*_like|np\.random|torch\.rand\w*\((?:len|\(\))|Beta|sample\(\)"
_BARE = r"\bDDP\((\w+(?:\(\))?)[^()]*\)", r"\1"
_NOT_BARE = (".module", "no_sync", "comm_hook", "broadcast_buffers")
_CLIPPED = r"^( *)([\w.\[\]]*optimizer\w*)\.step\(\)$", rf"\1{_IF_RANK_0}\n\1    {_CLIP}\n\1\2.step()"
_EARLY = (r"(\S+) if (\S.*?) else (model\.no_sync\(\))", r"\3 if \2 else \1"), (r"enabled=not (\w+)", r"enabled=\1")
_OFTEN = r"^( *)(\w*schedule\w*\.step\(\))$", rf"\1for _ in range({_RANKS}):\n\1    \2"
_INCOMPLETE = r"(optim\.\w+\()([\w.\[\]]+\.parameters\(\))", r"\1list(\2)[1:]"
_ALONE = r"^( *)dist\.barrier\(\)$", rf"\1{_IF_RANK_0}\n\1    dist.barrier()"
_SAVED_BY_ALL = r"^( *)if .*rank.*:\n(?=(?:\1    .*\n)*?\1    .*torch\.save\()", r"\1if True:\n"
MUTATIONS = (
    Mutation("set_epoch removed", ("LD001",), (_NO_EPOCH,), without=("shuffle=False",)),
    Mutation("DistributedSampler removed", ("LD002",), (_NO_SAMPLER, _NO_EPOCH), r"DistributedSampler\("),
    Mutation("one seed for all ranks", ("LD008",), (_ONE_SEED,), _DRAWS, note=True),
    Mutation("wrapper removed", ("LD009",), (_BARE,), without=_NOT_BARE),
    Mutation("rank 0 clips", ("LD011",), (_CLIPPED,), without=("averager", "average")),
    Mutation("loss divided by the ranks", ("LD014",), _scaled(f"/ {_RANKS}")),
    Mutation("loss times the ranks", ("LD014",), _scaled(f"* {_RANKS}")),
    Mutation("no_sync of the last micro-batch", ("LD016",), _EARLY, "sync"),
    Mutation("schedule steps per process", ("LD017",), (_OFTEN,)),
    Mutation("unscale_ removed", ("LD018",), (_removed(r"\.unscale_"),)),
    Mutation("optimizer without the first parameter", ("LD019",), (_INCOMPLETE,)),
    Mutation("zero_grad removed", ("LD020",), (_removed(r"\.zero_grad"),)),
    Mutation("train() removed", ("LD021",), (_removed(r"model\.train"),), r"\.eval\(\)"),
    Mutation("reduction of the metric removed", ("LD024",), (_removed(r"dist\.all_reduce"),), r"print\("),
    Mutation("sync_dist removed", ("LD024",), (("sync_dist=True", "sync_dist=False"),), note=True),
    Mutation("barrier of rank 0", ("LD027", "LD034"), (_ALONE,)),
    Mutation("all ranks save", ("LD032",), (_SAVED_BY_ALL,)),
    Mutation("group not destroyed", ("LD032",), (_removed("destroy_process_group"),), note=True),
)


@dataclass(frozen=True)
class Mutant:
    """A healthy program with a fault: the changed program, the name of the one that it was, and the fault."""

    case: Case
    mutation: Mutation

    @property
    def name(self) -> str:
        """Such as `set_epoch removed: accumulation_no_sync`."""
        return f"{self.mutation.name}: {self.case.name}"

    @property
    def kind(self) -> str:
        """`function`, `module` (of Lightning), `command`, or `library` (Accelerate, Transformers or Fabric)."""
        if any(word in self.case.text for word in ("Accelerator(", "TrainingArguments(", "Fabric(")):
            return "library"
        if self.case.command:
            return "command"
        return "module" if self.case.target[0].isupper() else "function"


@cache
def mutants() -> tuple[Mutant, ...]:
    """Returns each healthy program with each fault that applies to it."""
    healthy = [case for cases in (CASES, *FAMILIES.values()) for case in cases if not case.codes]
    return tuple(
        Mutant(replace(case, text=text), mutation)
        for case in healthy
        for mutation in MUTATIONS
        if (text := mutation.apply(case.text)) != case.text
    )


def ordered(found: Sequence[Mutant]) -> list[Mutant]:
    """Returns mutants in the order of a fixed seed: one of each fault and kind of program, then a second one."""
    rounds = Counter[tuple[str, str]]()
    keys = {}
    for mutant in sorted(found, key=lambda mutant: random.Random(f"{SEED} {mutant.name}").random()):
        cell = mutant.mutation.name, mutant.kind
        keys[mutant.name] = rounds[cell], len(keys)
        rounds[cell] += 1
    return sorted(found, key=lambda mutant: keys[mutant.name])


def examine_mutant(mutant: Mutant) -> dict[str, Any]:
    """Returns what the doctor says of a mutant."""
    report = examine_case(mutant.case).report
    expected = [state for state in report.checks if state.code in mutant.mutation.codes]
    result = {
        "fault": mutant.mutation.name,
        "kind": mutant.kind,
        "expected": mutant.mutation.codes,
        "found": [(finding.code, finding.verdict.value) for finding in report.findings],
        "seconds": round(report.seconds),
        "seen": time.strftime("%Y-%m-%d"),
    }
    if not is_found(result):
        result["states"] = [f"{state.code} {state.state.value}: {state.reason}" for state in expected]
        result["error"] = (report.error or report.hang).strip()[-500:]
    return result


def is_found(result: dict[str, Any], *, notes: bool = True) -> bool:
    """Returns whether one of the expected codes is reported as what the fault is, possibly by a note."""
    noted = next(each.note for each in MUTATIONS if each.name == result["fault"])
    wanted = {*REPORTED, "note"} if noted and notes else REPORTED
    return any(code in result["expected"] and verdict in wanted for code, verdict in result["found"])


def outcome(name: str, result: dict[str, Any]) -> str:
    """Returns `found`, `other code`, `equivalent` or `missed`."""
    if is_found(result):
        return "found"
    if any(name in names for names in EQUIVALENT.values()):
        return "equivalent"
    said = {code for code, verdict in result["found"] if verdict in REPORTED}
    return "other code" if any(name in names and code in said for (code, _), names in OTHER_CODE.items()) else "missed"


def table(results: dict[str, dict[str, Any]], possible: int) -> str:
    """Returns the section's generated part: counts by fault, and what is not found and why."""
    outcomes = {name: outcome(name, result) for name, result in results.items()}
    rows, total = [], Counter[str]()
    for mutation in MUTATIONS:
        counts = Counter(outcomes[name] for name, result in results.items() if result["fault"] == mutation.name)
        total += counts
        rows.append(f"| {mutation.name} | {' or '.join(mutation.codes)} | {_cells(counts)} |")
    kinds = Counter(result["kind"] for result in results.values())
    by_note = sum(is_found(result) and not is_found(result, notes=False) for result in results.values())
    listed_kinds = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = [
        f"Seen until {max(result['seen'] for result in results.values())}, on CPUs, with torch {version('torch')}. "
        f"Examined: {len(results)} of "
        f"{possible} mutants ({listed_kinds}).",
        f"{total['equivalent']} of them are equivalent. Of the other {len(results) - total['equivalent']}, "
        f"**{total['found'] + total['other code']} are found**, {by_note} of them by a note only.",
        "",
        "| fault | code | examined | equivalent | found | under another code | missed |",
        "|---|---|---|---|---|---|---|",
        *rows,
        f"| all | | {_cells(total)} |",
    ]
    others = {f"{code}: {why}": names for (code, why), names in OTHER_CODE.items()}
    unexplained = [name for name, how in outcomes.items() if how == "missed" and not _is_explained(name)]
    for title, how, reasons in (
        ("Missed", "missed", {**MISSED, "Not explained.": unexplained}),
        ("Found under another code", "other code", others),
        ("Equivalent", "equivalent", EQUIVALENT),
    ):
        listed = {why: [name for name in names if outcomes.get(name) == how] for why, names in reasons.items()}
        lines += ["", f"{title}:", ""] if any(listed.values()) else []
        lines += [f"- {why} ({'; '.join(names)})" for why, names in listed.items() if names]
    beside = [f"{name}: {', '.join(codes)}" for name, result in results.items() if (codes := others_of(result))]
    said = "No other fault is" if not beside else "Other faults are"
    lines += [
        "",
        f"{said} reported beside the expected one.",
        *(["", *(f"- {line}" for line in beside)] if beside else []),
    ]
    return "\n".join(lines) + "\n"


def others_of(result: dict[str, Any]) -> list[str]:
    """Returns the codes that are reported, but not expected, if an expected one is found."""
    others = {code for code, verdict in result["found"] if verdict in REPORTED} - set(result["expected"])
    return sorted(others) if is_found(result) else []


def _cells(counts: Counter[str]) -> str:
    shown = counts.total(), *(counts[how] for how in ("equivalent", "found", "other code", "missed"))
    return " | ".join(str(count) for count in shown)


def _is_explained(name: str) -> bool:
    return any(name in names for names in MISSED.values())


def write_table() -> None:
    """Writes the results so far into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found = table(json.loads(RESULTS.read_text()), len(mutants()))
    PAGE.write_text(f"{before}{BEGIN}{found}{END}{rest.partition(END)[2]}")


def main(words: Sequence[str], most: int | None = None) -> int:
    """Examines mutants that were not examined, or that are named, and returns how many of them are not found."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    missed = 0
    for mutant in ordered(mutants())[:most]:
        if any(word in mutant.name for word in words) if words else mutant.name not in results:
            results[mutant.name] = result = examine_mutant(mutant)
            RESULTS.write_text(json.dumps(results, indent=1))
            missed += not is_found(result)
            said = ", ".join(f"{code} {verdict}" for code, verdict in result["found"])
            how = "found" if is_found(result) else f"NOT FOUND, {' '.join(result['states'])} {result['error'][-200:]}"
            print(f"{mutant.name} ({mutant.kind}): {how} ({said}), {result['seconds']} s", flush=True)
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--most", type=int)
    parser.add_argument("--table", action="store_true")
    request = parser.parse_args()
    if request.table:
        write_table()
    else:
        sys.exit(bool(main(request.words, request.most)))
