"""The numbers that the conditions of the user's code read: ranks with different ones will decide differently."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Whether a number is finite says that the run has failed, and the time is another one on each rank.
_NO_DECISIONS = ("finite", "isnan", "isinf", "time", "clock", "elapsed", "start", "deadline")


@cache
def operands_of_file(path: str) -> dict[int, list[ast.expr]]:
    """Returns what the conditions of a file compare, or pass to a call, by the line of the condition."""
    with suppress(OSError, SyntaxError, ValueError):
        nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.If | ast.While)]
        return {node.lineno: found for node in nodes if (found := list(_operands(node.test)))}
    return {}


def values_of(operands: list[ast.expr], frame: Any) -> dict[str, float]:
    """Returns the numbers among the operands by their text. No code of the user is called."""
    found = {}
    for node in operands:
        value = _value(node, frame)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[ast.unparse(node)] = float(value)
    return found


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.UnaryOp):
        yield from _operands(test.operand)
    elif isinstance(test, ast.Compare | ast.Call) and not _is_no_decision(test):
        # A part of `a and b` may not be reached.
        for node in ast.walk(test):
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                yield node


def _is_no_decision(test: ast.expr) -> bool:
    text = ast.unparse(test).lower()
    return any(word in text for word in _NO_DECISIONS)


def _value(node: ast.expr, frame: Any) -> Any:
    """Returns the value of a name, an attribute of an object, or an item, without asking the object."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        with suppress(TypeError):
            return vars(_value(node.value, frame)).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _value(node.value, frame)
        if type(owner) in {dict, list, tuple}:
            with suppress(LookupError, TypeError):
                return owner[node.slice.value]
    return None
