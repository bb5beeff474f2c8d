"""Injects faults into the healthy programs of the suite by changing their source, and counts those that are found.

python tests/mutations.py               all that were not examined, which takes many hours on two cores
python tests/mutations.py set_epoch     those whose names contain one of the words, again
python tests/mutations.py --most 120    the first 120 of the order
python tests/mutations.py --table       writes the results so far into docs/proof.md

A mutation changes only functions that the program reaches. Each mutant is examined by all checks. The order is that of
a fixed seed: first one program of every kind with every fault, then a second one, and so on. On a busy machine,
DOCTOR_TIMEOUT gives the runs of an examination more seconds than 60.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from changed_sources import MUTATIONS, Mutation
from not_found import EQUIVALENT, MISSED, OTHER_CODE
from projects.cases import HEALTHY as SINGLE
from projects.cases import Case
from projects.families import HEALTHY
from suite import PAGE, examine_case

RESULTS = Path(__file__).with_name("doctor-mutations.json")
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"
SEED = 0
REPORTED = {"fault", "depends on the number of devices"}


@dataclass(frozen=True)
class Mutant:
    """A healthy program with a fault.

    Attributes:
        case: The program.
        kind: `function`, `module` (of Lightning), `command`, or `library` (Accelerate, Transformers or Fabric).
        mutation: The fault.
        source: The changed source.
    """

    case: Case
    kind: str
    mutation: Mutation
    source: str

    @property
    def name(self) -> str:
        """Such as `set_epoch removed: accumulation_no_sync`."""
        return f"{self.mutation.name}: {self.case.name}"


@cache
def mutants() -> tuple[Mutant, ...]:
    """Returns each healthy program with each fault that applies to it."""
    return tuple(_mutants())


def _mutants() -> Iterator[Mutant]:
    for case in (*SINGLE, *HEALTHY):
        source = case.path.read_text()
        tree = ast.parse(source)
        # A command is the whole file.
        reached = reached_from(tree, case.target) | reached_from(tree, case.data)
        reached = reached or {_name(node) for node in tree.body}
        text = "\n".join(ast.unparse(node) for node in tree.body if _name(node) in reached)
        for mutation in MUTATIONS:
            if mutation.applies(text):
                tree = ast.parse(source)
                if mutation.apply([node for node in tree.body if _name(node) in reached]):
                    changed = ast.unparse(ast.fix_missing_locations(tree))
                    yield Mutant(case, _kind(case, text), mutation, changed)


def reached_from(tree: ast.Module, name: str) -> set[str]:
    """Returns the names of the functions and classes of a file that a function refers to, directly or not."""
    owners = {_name(node): node for node in tree.body if _name(node)}
    found, waiting = set[str](), [name]
    while waiting:
        current = waiting.pop()
        if current in owners and current not in found:
            found.add(current)
            waiting += [part.id for part in ast.walk(owners[current]) if isinstance(part, ast.Name)]
    return found


def _name(node: ast.AST) -> str:
    return getattr(node, "name", "")


def _kind(case: Case, text: str) -> str:
    if any(word in text for word in ("Accelerator(", "TrainingArguments(", "Fabric(")):
        return "library"
    if case.command:
        return "command"
    return "module" if case.target[0].isupper() else "function"


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{Path(mutant.case.file).stem}.py"
        path.write_text(mutant.source)
        # An absolute path replaces that of the folder of the projects.
        report = examine_case(replace(mutant.case, file=str(path))).report
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
