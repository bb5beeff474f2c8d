"""Decisions that the ranks take differently: conditions of the user's code that depend on a rank's own data."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import RankRecord

# The values of ranks may be added in different orders.
_ROUNDING = 1e-5
# What programs call the rank that writes and prints, such as `is_master`.
_RANK = re.compile(
    r"rank|master|main_?proc|is_main|primary|leader|chief|(?:process|global|world|local)_?zero", re.IGNORECASE
)
_STOPS = (ast.Break, ast.Return, ast.Raise)
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
    """

    place: str
    text: str
    ranks: tuple[int, int]
    time: int
    stops: bool
    saves: bool


@dataclass(frozen=True)
class OwnValue:
    """A number `operand` that two ranks read differently in a condition `text` at a place of the user's code."""

    place: str
    text: str
    operand: str
    ranks: tuple[int, int]
    values: tuple[float, float]


def different_decisions(evidence: Evidence) -> Sequence[Decision]:
    """Returns the decisions that two ranks take differently, those that end training first."""
    ranks = _followed(evidence)
    found = [decision for one, other in combinations(ranks, 2) for decision in _differences(one, other, ranks)]
    return sorted(found, key=lambda decision: (not decision.stops, not decision.saves))


def stopping_decision(evidence: Evidence) -> Decision | None:
    """Returns the decision by which a rank ends training alone, if one does."""
    return next((decision for decision in different_decisions(evidence) if decision.stops), None)


def own_value(evidence: Evidence, decides: Callable[[Condition, set[str]], bool]) -> OwnValue | None:
    """Returns a number of its own by which each rank will decide, although the ranks decide alike so far.

    Args:
        evidence: The runs.
        decides: Whether a condition is meant, by the places of the optimizer steps.
    """
    ranks = _followed(evidence)
    steps = _places(ranks, "step")
    for one, other in combinations(ranks, 2):
        first, second = (_merged(record, "values") for record in (one, other))
        # What is decided before the first optimizer step is not learned.
        for place in sorted(place for place in first.keys() & second.keys() if _merged(one, "steps").get(place)):
            condition = _condition_at(place)
            if condition is None or condition.names_rank or condition.fails:
                continue
            if not decides(condition, steps):
                continue
            for a, b in zip(first[place], second[place], strict=False):
                for operand in sorted(key for key in a.keys() & b.keys() if _differ(a[key], b[key])):
                    where = f"{place} in {condition.function}"
                    return OwnValue(where, condition.text, operand, (one.rank, other.rank), (a[operand], b[operand]))
    return None


def different_metrics(evidence: Evidence) -> tuple[dict[str, Any], list[float]] | None:
    """Returns the first step of a schedule that gets another value on each rank, and the values."""
    for events in zip(*(rank.of_kind("metric of schedule") for rank in evidence.ranks), strict=False):
        values = [event["value"] for event in events]
        if max(values) - min(values) > _ROUNDING * max(map(abs, values)):
            return events[0], values
    return None


def deciding_numbers(evidence: Evidence) -> set[float]:
    """Returns the fractional numbers by which rank 0 decides what is kept, when training ends, or the learning rate."""
    ranks = evidence.again().ranks[:1]
    steps, saves = _places(ranks, "step"), _places(ranks, "save")
    found = {event["value"] for rank in ranks for event in rank.of_kind("metric of schedule")}
    for place, times in (item for rank in ranks for item in _merged(rank, "values").items()):
        one = _condition_at(place)
        if one and not one.fails and (one.is_around(saves) or one.keeps_weights(steps) or one.stops(steps)):
            found |= {value for values in times for value in values.values()}
    return {value for value in found if math.isfinite(value) and not value.is_integer()}


def _differ(first: float, second: float) -> bool:
    """Returns whether numbers differ by more than rounding; those that count something are not meant."""
    if not (math.isfinite(first) and math.isfinite(second)) or (first.is_integer() and second.is_integer()):
        return False
    return abs(first - second) > _ROUNDING * max(abs(first), abs(second))


def _followed(evidence: Evidence) -> Sequence[RankRecord]:
    """Returns the ranks of a run that has recorded the branches of the user's code."""
    if not evidence.ranks:
        return []
    run = evidence.later() if evidence.trained else None
    if run is None or not run.worked:
        # Ranks that wait for each other need not do so for long.
        alone = evidence.runs["single"].seconds if "single" in evidence.runs else 10.0
        seconds = min(evidence.spec.timeout, 10 + 3 * alone)
        run = evidence.run("decisions", interventions={"branches": True}, timeout=seconds)
    return run.ranks


def _differences(one: RankRecord, other: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Decision]:
    first, second = (_merged(record, "lines") for record in (one, other))
    steps_before = [_merged(record, "steps") for record in (one, other)]
    steps, saves = _places(ranks, "step"), _places(ranks, "save")
    for place in first.keys() & second.keys():
        condition = _condition_at(place)
        if condition is None or condition.names_rank:
            continue
        a, b = ([line in condition.body for line in lines[place]] for lines in (first, second))
        time = next((time for time, pair in enumerate(zip(a, b, strict=False), 1) if pair[0] != pair[1]), None)
        # A rank that never decides otherwise may be asked for its number, and one that decides before the first
        # optimizer step does not ask for what it has learned.
        is_early = not any(known.get(place, 1) for known in steps_before)
        if time is None or (len(set(a)) == 1 and len(set(b)) == 1 and (len(a) > 1 or is_early)):
            continue
        where, stops, saved = f"{place} in {condition.function}", condition.stops(steps), condition.is_around(saves)
        yield Decision(where, condition.text, (one.rank, other.rank), time, stops, saved)


def _places(ranks: Sequence[RankRecord], kind: str) -> set[str]:
    """Returns the lines of the user's code that were in events of a kind."""
    return {place for record in ranks for event in record.of_kind(kind) for place in event.get("stack", ())}


def _merged(record: RankRecord, key: str) -> dict[str, Any]:
    return {place: value for event in record.of_kind("branches") for place, value in event.get(key, {}).items()}


@dataclass(frozen=True)
class Condition:
    """An `if` or `while` of a file, with the function that contains it."""

    path: str
    node: ast.If | ast.While
    function: str
    scope: ast.AST

    @property
    def text(self) -> str:
        """What is tested, such as `loss > best`."""
        return ast.unparse(self.node.test)

    @property
    def body(self) -> range:
        """The lines that run by it."""
        return _lines_of(self.node.body)

    @property
    def lines(self) -> range:
        """The lines after the condition, those of its `else` included."""
        return range(self.node.lineno + 1, (self.node.end_lineno or self.node.lineno) + 1)

    @property
    def names_rank(self) -> bool:
        """Whether it asks for the rank, as `if rank == 0 and ...` does."""
        return any(_RANK.search(name) for name in _names(self.node.test))

    @property
    def fails(self) -> bool:
        """Whether the program fails by it, which ends all ranks."""
        last = self.node.body[-1]
        return isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and bool(_names(last) & _ENDS))

    def keeps_weights(self, _: set[str]) -> bool:
        """Returns whether weights are saved or copied by it, as those of the best epoch."""
        names = {name for statement in self.node.body for name in _names(statement)}
        return any("save" in name.lower() or "state_dict" in name for name in names)

    def is_around(self, places: Iterable[str]) -> bool:
        """Returns whether one of these places is run or not by it."""
        return any(line in self.lines for line in self._lines(places))

    def stops(self, steps: set[str]) -> bool:
        """Returns whether the training loop ends by it, or by a value that it sets."""
        names, attributes = _assigned(self.node)
        reached = [self]
        # Through up to three other values, as `best`, then `patience`, then `stop`.
        for _ in range(3):
            for other in _conditions(self.path).values():
                used, same = _names(other.node.test), other.scope is self.scope
                if other not in reached and (used & attributes or (used & names and same)):
                    reached.append(other)
                    more = _assigned(other.node)
                    attributes |= more[1]
                    names |= more[0] if same else set()
        return any(condition.ends_training(steps) for condition in reached)

    def ends_training(self, steps: set[str]) -> bool:
        """Returns whether it leaves a loop or function in which the optimizer steps."""
        first, last = getattr(self.scope, "lineno", 0), getattr(self.scope, "end_lineno", 10**9)
        lines = self._lines(steps)
        if not any(first <= line <= last for line in lines):
            return False
        for node in self._statements():
            if isinstance(node, ast.Break):
                loop = self._loop_of(node)
                if loop is None or any(line in _lines_of([loop]) for line in lines):
                    return True
            elif isinstance(node, _STOPS) or (isinstance(node, ast.Call) and _names(node.func) & _ENDS):
                return True
        return isinstance(self.node, ast.While) and max(lines) in self.lines

    def skips_step(self, steps: set[str]) -> bool:
        """Returns whether the optimizer steps by it, or not: in its body alone, or after what it continues."""
        lines = self._lines(steps)
        if isinstance(self.node, ast.While):
            return False
        inside, otherwise = (
            bool(part) and any(line in _lines_of(part) for line in lines) for part in (self.node.body, self.node.orelse)
        )
        if inside or otherwise:
            return inside != otherwise
        loop = self._loop_of(self.node)
        continues = any(isinstance(part, ast.Continue) and self._loop_of(part) is loop for part in self._statements())
        return continues and loop is not None and any(self.lines.stop <= line in _lines_of([loop]) for line in lines)

    def _lines(self, places: Iterable[str]) -> list[int]:
        """Returns the lines of places in the same file."""
        return [int(place.rpartition(":")[2]) for place in places if place.startswith(f"{self.path}:")]

    def _statements(self) -> Iterator[ast.AST]:
        return (part for statement in self.node.body for part in ast.walk(statement))

    def _loop_of(self, node: ast.AST) -> ast.For | ast.While | None:
        """Returns the innermost loop around a node."""
        loops = [loop for loop in ast.walk(self.scope) if isinstance(loop, ast.For | ast.While)]
        around = [loop for loop in loops if any(part is node for part in ast.walk(loop))]
        return max(around, key=lambda loop: loop.lineno, default=None)


def _condition_at(place: str) -> Condition | None:
    """Returns the condition of a line `file:line`."""
    path, _, number = place.rpartition(":")
    return _conditions(path).get(int(number))


def _lines_of(statements: Sequence[ast.stmt]) -> range:
    return range(statements[0].lineno, (statements[-1].end_lineno or statements[-1].lineno) + 1)


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
def _conditions(path: str) -> dict[int, Condition]:
    """Returns the conditions of a file by the line of their test."""
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[int, Condition] = {}

    def visit(node: ast.AST, scope: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, child, child.name)
                continue
            if isinstance(child, ast.If | ast.While):
                found[child.lineno] = Condition(path, child, name, scope)
            visit(child, scope, name)

    visit(tree, tree, "<module>")
    return found
