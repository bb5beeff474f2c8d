"""The conditions of the user's code, and whether training ends by one."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# What programs call the rank that writes and prints, such as `is_master`.
_RANK = re.compile(
    r"rank|master|main_?proc|is_main|primary|leader|chief|(?:process|global|world|local)_?zero", re.IGNORECASE
)
_STOPS = (ast.Break, ast.Return, ast.Raise)
_ENDS = {"exit", "_exit", "quit"}


@dataclass(frozen=True)
class Condition:
    """An `if` or `while` of a file, with the function that contains it."""

    node: ast.If | ast.While
    function: str
    body: tuple[int, int]
    scope: ast.AST
    tree: ast.AST

    @property
    def text(self) -> str:
        """What is tested, such as `loss > best`."""
        return ast.unparse(self.node.test)

    @property
    def names_rank(self) -> bool:
        """Whether it asks for the rank, as `if rank == 0 and ...` does."""
        return any(_RANK.search(name) for name in _names(self.node.test))

    @property
    def fails(self) -> bool:
        """Whether the program fails by it, which ends all ranks."""
        last = self.node.body[-1]
        return isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and bool(_names(last) & _ENDS))

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

    @property
    def keeps_weights(self) -> bool:
        """Whether weights are saved or copied by it, as those of the best epoch."""
        names = {name for statement in self.node.body for name in _names(statement)}
        return any("save" in name.lower() or "state_dict" in name for name in names)

    def stops(self, steps: set[str], path: str) -> bool:
        """Returns whether the training loop ends by it, or by a value that it sets."""
        if ends_training(self, steps, path):
            return True
        names, attributes = _assigned(self.node)
        for _ in range(3):
            for other in _conditions(path).values():
                used = _names(other.node.test)
                if not (used & attributes or (used & names and other.scope is self.scope)):
                    continue
                if ends_training(other, steps, path):
                    return True
                more = _assigned(other.node)
                attributes |= more[1]
                names |= more[0] if other.scope is self.scope else set()
        return False


def condition_at(place: str) -> Condition | None:
    """Returns the condition of a line `file:line`."""
    path, _, number = place.rpartition(":")
    return _conditions(path).get(int(number))


def ends_training(condition: Condition, steps: set[str], path: str) -> bool:
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


def skips_step(condition: Condition, steps: set[str], path: str) -> bool:
    """Returns whether the optimizer steps by a condition, or not: in its body alone, or after what it continues."""
    node, scope = condition.node, condition.scope
    lines = [int(place.rpartition(":")[2]) for place in steps if place.startswith(f"{path}:")]
    if isinstance(node, ast.While):
        return False
    inside, otherwise = (
        any(part[0].lineno <= line <= (part[-1].end_lineno or 0) for line in lines) if part else False
        for part in (node.body, node.orelse)
    )
    if inside or otherwise:
        return inside != otherwise
    loop, last = _loop_of(scope, node), node.end_lineno or node.lineno
    continues = any(
        isinstance(part, ast.Continue) and _loop_of(scope, part) is loop
        for statement in node.body
        for part in ast.walk(statement)
    )
    return continues and loop is not None and any(last < line <= (loop.end_lineno or 0) for line in lines)


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
                last = child.body[-1].end_lineno or child.body[-1].lineno
                found[child.lineno] = Condition(child, name, (child.body[0].lineno, last), scope, tree)
            visit(child, scope, name)

    visit(tree, tree, "<module>")
    return found
