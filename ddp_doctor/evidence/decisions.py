"""Decisions that the ranks take differently: conditions of the user's code that depend on a rank's own data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import RankRecord

# What programs call the rank that writes and prints, such as `is_master`.
_RANK = re.compile(
    r"rank|master|main_?proc|is_main|primary|leader|chief|(?:process|global|world|local)_?zero", re.IGNORECASE
)
_STOPS = (ast.Break, ast.Return, ast.Raise)
# The values of ranks may be added in different orders.
_ROUNDING = 1e-5
_ENDS = {"exit", "_exit", "quit"}


@dataclass(frozen=True)
class Decision:
    """A condition whose outcome differs between two ranks, and not by their numbers alone.

    Attributes:
        place: The user's `file:line in function`.
        text: The condition, such as `loss > best`.
        ranks: The two ranks.
        time: Which evaluation of the condition differs first, from 1.
        stops: Whether it decides when training ends: directly, or through a value that it sets.
        saves: Whether a checkpoint is written by it.
        lines: The first and the last line of what it decides about.
    """

    place: str
    text: str
    ranks: tuple[int, int]
    time: int
    stops: bool = False
    saves: bool = False
    lines: tuple[int, int] = (0, 0)

    def contains(self, place: str) -> bool:
        """Returns whether a place of the user's code is run or not by this decision."""
        path, _, rest = place.partition(" ")[0].rpartition(":")
        return self.place.startswith(f"{path}:") and self.lines[0] <= int(rest or 0) <= self.lines[1]


def different_decisions(evidence: Evidence) -> Sequence[Decision]:
    """Returns the decisions that two ranks take differently, those that end training first."""
    if "ranks" not in evidence.runs or not evidence.ranks:
        return []
    run = evidence.worked("again")
    if run is None or not run.ranks[0].of_kind("branches"):
        # Ranks that wait for each other need not do so for long.
        alone = evidence.runs["single"].seconds if "single" in evidence.runs else 10.0
        seconds = min(evidence.spec.timeout, 10 + 3 * alone)
        run = evidence.run("decisions", interventions={"branches": True}, timeout=seconds)
    found = [decision for one, other in combinations(run.ranks, 2) for decision in _differences(one, other, run.ranks)]
    return sorted(found, key=lambda decision: (not decision.stops, not decision.saves))


def different_metrics(evidence: Evidence) -> tuple[dict[str, Any], int, list[float]] | None:
    """Returns the first step of a schedule that gets another value on each rank, its number, and the values."""
    steps = [rank.of_kind("metric of schedule") for rank in evidence.ranks]
    for time, events in enumerate(zip(*steps, strict=False), start=1):
        values = [event["value"] for event in events]
        if max(values) - min(values) > _ROUNDING * max(map(abs, values)):
            return events[0], time, values
    return None


def stopping_decision(evidence: Evidence) -> Decision | None:
    """Returns the decision by which a rank ends training alone, if one does."""
    return next((decision for decision in different_decisions(evidence) if decision.stops), None)


def decision_about(evidence: Evidence, place: str) -> Decision | None:
    """Returns the decision by which one of two ranks runs a place of the user's code."""
    return next((decision for decision in different_decisions(evidence) if place and decision.contains(place)), None)


def _differences(one: RankRecord, other: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Decision]:
    first, second = (_merged(record, "lines") for record in (one, other))
    learned = [_merged(record, "steps") for record in (one, other)]
    steps = {place for record in ranks for event in record.of_kind("step") for place in event.get("stack", ())}
    saves = {place for record in ranks for event in record.of_kind("save") for place in event.get("stack", ())}
    for place in first.keys() & second.keys():
        path, _, number = place.rpartition(":")
        condition = _conditions(path).get(int(number))
        if condition is None or not isinstance(condition.node, ast.If | ast.While):
            continue
        a, b = ([condition.outcome(line) for line in lines[place]] for lines in (first, second))
        time = next((time for time, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        # A rank that never decides otherwise may be asked for its number, and one that decides before the first
        # optimizer step does not ask for what it has learned.
        is_early = not any(steps_before.get(place, 1) for steps_before in learned)
        if time is None or (len(set(a)) == 1 and len(set(b)) == 1 and (len(a) > 1 or is_early)):
            continue
        if condition.names_rank:
            continue
        stops = condition.stops(steps, path)
        inside = any(condition.contains(line) for line in saves if line.startswith(f"{path}:"))
        where = f"{place} in {condition.function}"
        yield Decision(where, condition.text, (one.rank, other.rank), time + 1, stops, inside, condition.lines)


def _merged(record: RankRecord, key: str) -> dict[str, Any]:
    return {place: value for event in record.of_kind("branches") for place, value in event[key].items()}


@dataclass(frozen=True)
class _Condition:
    """An `if` or `while` of a file, with the function that contains it."""

    node: ast.If | ast.While
    function: str
    body: tuple[int, int]
    scope: ast.AST
    tree: ast.AST

    @property
    def text(self) -> str:
        return ast.unparse(self.node.test)

    @property
    def names_rank(self) -> bool:
        """Whether it asks for the rank, as `if rank == 0 and ...` does."""
        return any(_RANK.search(name) for name in _names(self.node.test))

    def outcome(self, line: int) -> bool:
        """Returns whether the body ran, by the line that followed."""
        return self.body[0] <= line <= self.body[1]

    @property
    def lines(self) -> tuple[int, int]:
        """The lines after the condition, those of its `else` included."""
        return self.node.lineno + 1, self.node.end_lineno or self.node.lineno

    def contains(self, place: str) -> bool:
        """Returns whether a line is among them."""
        return self.lines[0] <= int(place.rpartition(":")[2]) <= self.lines[1]

    def stops(self, steps: set[str], path: str) -> bool:
        """Returns whether the training loop ends by it, or by a value that it sets."""
        if _ends_training(self, steps, path):
            return True
        names, attributes = _assigned(self.node)
        for _ in range(3):
            for other in _conditions(path).values():
                used = _names(other.node.test)
                if not (used & attributes or (used & names and other.scope is self.scope)):
                    continue
                if _ends_training(other, steps, path):
                    return True
                more = _assigned(other.node)
                attributes |= more[1]
                names |= more[0] if other.scope is self.scope else set()
        return False


def _ends_training(condition: _Condition, steps: set[str], path: str) -> bool:
    """Returns whether a condition leaves a loop or function in which the optimizer steps."""
    scope = condition.scope
    first, last = getattr(scope, "lineno", 0), getattr(scope, "end_lineno", 10**9)
    lines = [int(place.rpartition(":")[2]) for place in steps if place.startswith(f"{path}:")]
    if not any(first <= line <= last for line in lines):
        return False
    for node in [part for statement in condition.node.body for part in ast.walk(statement)]:
        if isinstance(node, ast.Break):
            loop = _loop_of(scope, node)
            if loop is None or any(loop.lineno <= line <= (loop.end_lineno or 0) for line in lines):
                return True
        elif isinstance(node, _STOPS) or (isinstance(node, ast.Call) and _names(node.func) & _ENDS):
            return True
    return isinstance(condition.node, ast.While) and condition.contains(f":{max(lines)}")


def _loop_of(scope: ast.AST, node: ast.AST) -> ast.For | ast.While | None:
    """Returns the innermost loop around a node."""
    loops = [loop for loop in ast.walk(scope) if isinstance(loop, ast.For | ast.While)]
    around = [loop for loop in loops if any(part is node for part in ast.walk(loop))]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _names(node: ast.AST) -> set[str]:
    """Returns the names and attributes that an expression uses."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
    }


def _assigned(node: ast.AST) -> tuple[set[str], set[str]]:
    """Returns the names and the attributes that statements assign."""
    stored = [part for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Store)]
    names = {part.id for part in stored if isinstance(part, ast.Name)}
    return names, {part.attr for part in stored if isinstance(part, ast.Attribute)}


@cache
def _conditions(path: str) -> dict[int, _Condition]:
    """Returns the conditions of a file by the line of their test."""
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[int, _Condition] = {}

    def visit(node: ast.AST, scope: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, child, child.name)
                continue
            if isinstance(child, ast.If | ast.While):
                last = child.body[-1].end_lineno or child.body[-1].lineno
                found[child.lineno] = _Condition(child, name, (child.body[0].lineno, last), scope, tree)
            visit(child, scope, name)

    visit(tree, tree, "<module>")
    return found
