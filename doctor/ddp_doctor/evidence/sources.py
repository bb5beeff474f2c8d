"""What the user's source code does in parts that were not run, such as those that resume."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# Names of what is no schedule.
_KNOWN = re.compile(
    r"opt|model|net|module|ddp|ema|average|scaler|teacher|student|(?:en|de)coder|backbone|head|critic|gen"
)


def loads_without_schedule(files: Iterable[str]) -> bool:
    """Returns whether code restores an optimizer, and neither restores a schedule nor brings it to its position.

    A schedule is brought to its position by `last_epoch`, by a step with a number, or by a loop that only steps it.

    Args:
        files: Paths of the user's files; those that cannot be read are skipped.
    """
    nodes = [node for path in files for node in _nodes(path)]
    restored = [_owner(node) for node in nodes if _calls(node, "load_state_dict")]
    # What has another name may be a schedule.
    others = [name for name in restored if "sched" in name or not _KNOWN.search(name)]
    if others or not any("opt" in name for name in restored):
        return False
    return not any(_positions(node) for node in nodes)


def loads_state(files: Iterable[str]) -> bool:
    """Returns whether code restores the state of anything; files that cannot be read may do so."""
    paths = list(files)
    calls = ("load_state_dict", "load_state", "load_checkpoint", "load_from_checkpoint", "restore")
    nodes = [node for path in paths for node in _nodes(path)]
    return not nodes or any(_calls(node, name) for node in nodes for name in calls)


def _nodes(path: str) -> Iterator[ast.AST]:
    with suppress(OSError, SyntaxError, ValueError):
        yield from ast.walk(ast.parse(Path(path).read_text()))


def _positions(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg == "last_epoch"
    if isinstance(node, ast.Attribute):
        return node.attr == "last_epoch"
    if isinstance(node, ast.For | ast.While):
        return all(isinstance(part, ast.Expr) and _calls(part.value, "step") for part in node.body)
    return _calls(node, "step") and isinstance(node, ast.Call) and bool(node.args) and "sched" in _owner(node)


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _owner(node: ast.AST) -> str:
    """Returns the text of the object whose method is called, such as `self.optimizer`."""
    found = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
    return ast.unparse(found).lower()
