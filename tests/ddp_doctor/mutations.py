"""Injects faults into the healthy programs of the suite by changing their source, and counts those that are found.

python tests/ddp_doctor/mutations.py               all, which takes hours on two cores
python tests/ddp_doctor/mutations.py set_epoch     those whose names contain one of the words
python tests/ddp_doctor/mutations.py --every 20    each twentieth of them

A mutation changes only functions that the program reaches. Each mutant is examined by the check that should find it.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from changed_sources import MUTATIONS, Mutation
from projects.cases import HEALTHY as SINGLE
from projects.cases import Case
from projects.families import HEALTHY

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "doctor-mutations.json"


@dataclass(frozen=True)
class Mutant:
    """A healthy program with a fault.

    Attributes:
        case: The program.
        mutation: The fault.
        source: The changed source.
    """

    case: Case
    mutation: Mutation
    source: str

    @property
    def name(self) -> str:
        """Such as `set_epoch removed: accumulation_no_sync`."""
        return f"{self.mutation.name}: {self.case.name}"


def mutants() -> Iterator[Mutant]:
    """Yields each healthy program that is a function with each fault that applies to it."""
    for case in (*SINGLE, *HEALTHY):
        if case.command or not case.target or case.target == "Module":
            continue
        source = case.path.read_text()
        tree = ast.parse(source)
        reached = reached_from(tree, case.target)
        text = "\n".join(ast.unparse(node) for node in tree.body if _name(node) in reached)
        for mutation in MUTATIONS:
            if mutation.applies(text):
                tree = ast.parse(source)
                if mutation.apply([node for node in tree.body if _name(node) in reached]):
                    yield Mutant(case, mutation, ast.unparse(ast.fix_missing_locations(tree)))


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


def examine_mutant(mutant: Mutant, timeout: float = 60.0) -> tuple[bool, str]:
    """Returns whether the fault is found, and what the doctor said instead if it is not."""
    from ddp_doctor import examine

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{Path(mutant.case.file).stem}.py"
        path.write_text(mutant.source)
        report = examine(f"{path}:{mutant.case.target}", only=mutant.mutation.codes, timeout=timeout)
    verdicts = {finding.verdict.value for finding in report.findings if finding.code in mutant.mutation.codes}
    if verdicts & {"fault", "depends on the number of devices"}:
        return True, ""
    if report.error:
        return False, f"the program fails: {report.error.strip().splitlines()[-1]}"
    return False, ", ".join(sorted(verdicts)) or next(
        (state.reason for state in report.states if state.reason), "silent"
    )


def main(words: Sequence[str], every: int = 1) -> int:
    """Examines the mutants, prints what was found, and returns how many were not."""
    wanted = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)][::every]
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    missed: list[str] = []
    for mutant in wanted:
        found, why = examine_mutant(mutant)
        results[mutant.name] = why if not found else "found"
        RESULTS.write_text(json.dumps(results, indent=1))
        missed += [] if found else [f"{mutant.name}: {why}"]
        print(f"{mutant.name}: {'found' if found else f'NOT FOUND ({why})'}", flush=True)
    print(f"found {len(wanted) - len(missed)} of {len(wanted)}", *missed, sep="\n  ")
    return len(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    request = parser.parse_args()
    sys.exit(bool(main(request.words, request.every)))
