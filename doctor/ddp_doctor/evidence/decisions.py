"""Decisions that each rank takes by values of its own: conditions of the user's code that differ between the ranks."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import RankRecord
from ddp_doctor.source.file import SourceFile, names_in, names_rank

# What a condition decides, the most serious first.
ENDS, KEEPS, STEPS = "when training ends", "which weights are kept", "whether the optimizer steps"
_DECIDES = (ENDS, KEEPS, STEPS)
# The values of ranks may be added in different orders.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Decision:
    """A condition that two ranks decide, or will decide, by values of their own.

    Attributes:
        decides: What it decides: `ENDS`, `KEEPS` or `STEPS`.
        taken: Whether its outcome differs, not only a number that it reads.
        how: How it differs, in words.
    """

    place: str
    text: str
    decides: str
    taken: bool
    how: str


def decisions(evidence: Evidence) -> Sequence[Decision]:
    """Returns the decisions in which two ranks differ, the most serious first."""
    ranks, found = _followed(evidence), list[Decision]()
    steps, saves = _places(ranks, "step"), _places(ranks, "save")
    for pair in combinations(ranks, 2):
        times = [_times(rank) for rank in pair]
        for place in sorted(set.intersection(*map(set, times))):
            # What names the rank is meant to differ.
            if (condition := _condition_at(place)) and not names_rank(condition.node.test):
                found += _differences(condition, times, [rank.rank for rank in pair], steps, saves)
    return sorted(found, key=lambda decision: (not decision.taken, _DECIDES.index(decision.decides)))


def stopping_decision(evidence: Evidence) -> Decision | None:
    """Returns the decision by which a rank ends training alone, if one does."""
    return next((one for one in decisions(evidence) if one.taken and one.decides == ENDS), None)


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
    for place, times in (item for rank in ranks for item in _times(rank).items()):
        one = _condition_at(place)
        if one and not one.fails and (one.keeps(saves) or one.stops(steps)):
            found |= {value for time in times for value in time["reads"].values()}
    return {value for value in found if math.isfinite(value) and not value.is_integer()}


def _differences(
    condition: Condition,
    times: Sequence[dict[str, list[dict[str, Any]]]],
    ranks: Sequence[int],
    steps: set[str],
    saves: set[str],
) -> Iterator[Decision]:
    """Yields how a condition differs between two ranks.

    A rank that never decides otherwise may be asked for its number, and one that decides before the first optimizer
    step does not ask for what it has learned.
    """
    where, owns = (condition.place, ast.unparse(condition.node.test)), [of_rank[condition.line] for of_rank in times]
    outcomes = [[time["then"] in condition.body for time in own if time["then"] is not None] for own in owns]
    learned = any(time["step"] for own in owns for time in own)
    differ = [number for number, pair in enumerate(zip(*outcomes, strict=False)) if pair[0] != pair[1]]
    constant = all(len(set(own)) == 1 for own in outcomes) and (len(outcomes[0]) > 1 or not learned)

    def ends(time: dict[str, Any]) -> str:
        endings = [one.line for one in condition.reached(steps) if one.ends_training(steps)]
        # After a collective, the ranks may decide together.
        after = (other for line in endings for of_rank in times for other in of_rank.get(line, ()))
        alone = any(other["collectives"] == time["collectives"] and other["step"] >= time["step"] for other in after)
        return ENDS if alone else ""

    if differ and not constant and (decides := ends(owns[0][differ[0]]) or condition.keeps_by(saves)):
        how = f"its evaluation {differ[0] + 1} differs between ranks {ranks[0]} and {ranks[1]}"
        yield Decision(*where, decides, taken=True, how=how)
    pairs = (pair for pair in zip(*owns, strict=False) if pair[0]["step"])
    numbers = ((text, a, b) for a, b in pairs for text in a["reads"] if text in b["reads"])
    own = next((one for one in numbers if _differ(one[1]["reads"][one[0]], one[2]["reads"][one[0]])), None)
    if own and not condition.fails and (decides := ends(own[1]) or condition.decides_itself(steps, saves)):
        shown = " and ".join(
            f"{time['reads'][own[0]]:.6g} on rank {rank}" for time, rank in zip(own[1:], ranks, strict=True)
        )
        yield Decision(*where, decides, taken=False, how=f"it reads `{own[0]}`, which is {shown}")


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


def _places(ranks: Sequence[RankRecord], kind: str) -> set[str]:
    """Returns the lines of the user's code that were in events of a kind."""
    return {place for record in ranks for event in record.of_kind(kind) for place in event.get("stack", ())}


def _times(record: RankRecord) -> dict[str, list[dict[str, Any]]]:
    """Returns what was recorded of each evaluation of a condition, by its line."""
    return {place: times for event in record.of_kind("branches") for place, times in event["times"].items()}


@dataclass(frozen=True)
class Condition:
    """An `if` or `while` of a file."""

    file: SourceFile
    node: ast.If | ast.While

    @property
    def place(self) -> str:
        """The user's `file:line in function`."""
        return f"{self.line} in {getattr(self.file.scope(self.node), 'name', '<module>')}"

    @property
    def body(self) -> range:
        """The lines that run by it."""
        last = self.node.body[-1]
        return range(self.node.body[0].lineno, (last.end_lineno or last.lineno) + 1)

    @property
    def fails(self) -> bool:
        """Whether the program fails by it, which ends all ranks."""
        last = self.node.body[-1]
        return isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and _exits(last.value))

    @property
    def line(self) -> str:
        """Its `file:line`."""
        return f"{self.file.path}:{self.node.lineno}"

    def keeps_by(self, saves: set[str]) -> str:
        """Returns `KEEPS` if something is saved or not by it."""
        return KEEPS if self._is_around(saves) else ""

    def decides_itself(self, steps: set[str], saves: set[str]) -> str:
        """Returns what it decides directly, beside the end of the training."""
        return KEEPS if self.keeps(saves) else STEPS if self._skips_step(steps) else ""

    def keeps(self, saves: set[str]) -> bool:
        """Returns whether weights are saved or copied by it, as those of the best epoch."""
        named = any("save" in name.lower() or "state_dict" in name for name in names_in(self.node.body))
        return named or self._is_around(saves)

    def _is_around(self, places: Iterable[str]) -> bool:
        """Returns whether one of these places is run or not by it."""
        return any(_contains(self.node, line) for line in self._lines(places))

    def stops(self, steps: set[str]) -> bool:
        """Returns whether the training loop ends by it, or by a value that it sets."""
        return any(condition.ends_training(steps) for condition in self.reached(steps))

    def reached(self, steps: set[str]) -> Sequence[Condition]:
        """Returns the conditions that it influences by values that it sets, as `best`, and then `patience`.

        Attributes may be read in another file, where the optimizer steps.
        """
        paths = {str(self.file.path), *(place.rpartition(":")[0] for place in steps)}
        others, reached = [one for path in sorted(paths) for one in _conditions(path).values()], [self]
        files = {one.file.path: one.file for one in others}.values()
        assigned = [(file, node) for file in files for node in file.nodes if isinstance(node, ast.Assign)]
        for one in reached:
            scope, (names, attributes) = one.file.scope(one.node), _stored(one.node)
            for file, node in assigned:
                # As in `self.stop = self.bad > self.patience`.
                if names_in([node.value]) & (attributes | names if file.scope(node) is scope else attributes):
                    names, attributes = (old | new for old, new in zip((names, attributes), _stored(node), strict=True))
            for other in others:
                seen = attributes | names if other.file.scope(other.node) is scope else attributes
                if other not in reached and names_in([other.node.test]) & seen:
                    reached.append(other)
        return reached

    def ends_training(self, steps: set[str]) -> bool:
        """Returns whether it leaves a loop or function in which the optimizer steps."""
        left = [self.file.loops(part)[0] for part in self._parts if isinstance(part, ast.Break)]
        left += [self.node] if isinstance(self.node, ast.While) else []
        if any(isinstance(part, ast.Return | ast.Raise) or _exits(part) for part in self._parts):
            left.append(self.file.scope(self.node))
        return any(_contains(one, line) for one in left for line in self._lines(steps))

    def _skips_step(self, steps: set[str]) -> bool:
        """Returns whether the optimizer steps by it, or not: in its body alone, or after what it continues."""
        lines, loops = self._lines(steps), self.file.loops(self.node)[:1]
        inside = any(line in self.body for line in lines)
        outside = any(_contains(statement, line) for statement in self.node.orelse for line in lines)
        continues = any(isinstance(part, ast.Continue) and self.file.loops(part)[:1] == loops for part in self._parts)
        after = any(_contains(loop, line) and line >= self.body.stop for loop in loops for line in lines)
        return isinstance(self.node, ast.If) and (inside != outside or (continues and not inside and after))

    @property
    def _parts(self) -> list[ast.AST]:
        """All that its body contains."""
        return [part for statement in self.node.body for part in ast.walk(statement)]

    def _lines(self, places: Iterable[str]) -> list[int]:
        """Returns the lines of places in the same file."""
        return [int(place.rpartition(":")[2]) for place in places if place.startswith(f"{self.file.path}:")]


def _stored(node: ast.AST) -> tuple[set[str], set[str]]:
    """Returns the names and the attributes that a statement sets."""
    stored = [part for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Store)]
    return tuple({getattr(part, key) for part in stored if hasattr(part, key)} for key in ("id", "attr"))  # type: ignore[return-value]


def _contains(node: ast.AST, line: int) -> bool:
    """Returns whether a line is within a function, a loop or a module."""
    return getattr(node, "lineno", 0) <= line <= getattr(node, "end_lineno", line)


def _exits(node: ast.AST) -> bool:
    """Returns whether a node is a call such as `sys.exit()`."""
    return isinstance(node, ast.Call) and bool(names_in([node.func]) & {"exit", "_exit", "quit"})


def _condition_at(place: str) -> Condition | None:
    """Returns the condition of a line `file:line`."""
    path, _, number = place.rpartition(":")
    return _conditions(path).get(int(number))


@cache
def _conditions(path: str) -> dict[int, Condition]:
    """Returns the conditions of a file by the line of their test."""
    try:
        file = SourceFile(Path(path), Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return {node.lineno: Condition(file, node) for node in file.nodes if isinstance(node, ast.If | ast.While)}
