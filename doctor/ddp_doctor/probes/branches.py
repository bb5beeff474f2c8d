"""The branches that the user's code takes, and the numbers that its conditions read, on each rank."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from ddp_doctor.records.recorder import Recorder, is_user_file, user_frames

# Whether a number is finite says that the run has failed, and the time is another one on each rank.
_NO_DECISIONS = ("finite", "isnan", "isinf", "time", "clock", "elapsed", "start", "deadline")
# What is passed to a function with such names may be combined over the ranks before it decides.
_COMBINES = ("reduce", "gather", "broadcast")
_DEPTH = 4


class Operand(NamedTuple):
    """A part of a condition, and the functions whose calls contain it."""

    node: ast.expr
    calls: tuple[ast.expr, ...]


@cache
def operands_of_file(path: str) -> dict[int, list[Operand]]:
    """Returns what the conditions of a file compare, or pass to a call, by the line of the condition."""
    with suppress(OSError, SyntaxError, ValueError):
        nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.If | ast.While)]
        return {node.lineno: found for node in nodes if (found := list(_operands(node.test)))}
    return {}


def values_of(operands: list[Operand], frame: Any) -> dict[str, float]:
    """Returns the numbers of a rank's own among the operands, by their text. No code of the user is called."""
    found = {}
    for node, calls in operands:
        if any(_combines(call, frame) for call in calls):
            continue
        value = _value(node, frame)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[ast.unparse(node)] = float(value)
    return found


def _operands(test: ast.expr) -> Iterator[Operand]:
    if isinstance(test, ast.UnaryOp):
        yield from _operands(test.operand)
    elif isinstance(test, ast.Compare | ast.Call) and not _is_no_decision(test):
        # A part of `a and b` may not be reached.
        yield from _parts(test, ())


def _parts(node: ast.AST, calls: tuple[ast.expr, ...]) -> Iterator[Operand]:
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        yield Operand(node, calls)
    if isinstance(node, ast.Call):
        calls = (*calls, node.func)
    for part in ast.iter_child_nodes(node):
        yield from _parts(part, calls)


def _combines(call: ast.expr, frame: Any) -> bool:
    """Returns whether a function, or one that it calls, has the name of a collective in its code."""
    name = call.attr if isinstance(call, ast.Attribute) else ast.unparse(call)
    if _is_collective(name):
        return True
    if isinstance(call, ast.Attribute):
        function = inspect.getattr_static(_value(call.value, frame), name, None)
    else:
        function = _value(call, frame)
    function = getattr(function, "__func__", function)
    return isinstance(function, FunctionType) and _has_collective(function, _DEPTH)


@cache
def _has_collective(function: FunctionType, depth: int) -> bool:
    code = function.__code__
    codes = [code, *(constant for constant in code.co_consts if isinstance(constant, CodeType))]
    names = {name for one in codes for name in one.co_names}
    if any(map(_is_collective, names)):
        return True
    called = (function.__globals__.get(name) for name in names if depth > 1)
    return any(isinstance(one, FunctionType) and _has_collective(one, depth - 1) for one in called)


def _is_collective(name: str) -> bool:
    return any(word in name.lower() for word in _COMBINES)


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


# A program that runs more lines in Python is not followed further.
_MOST_LINES = 300_000
_MOST_TIMES = 100


class BranchProbe:
    """Records the line that follows each line of the user's code, every time, as long as the code is not too busy."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.lines: dict[str, list[int]] = {}
        # The number of optimizer steps before the last time, by line.
        self.steps: dict[str, int] = {}
        # The numbers that a condition reads, every time, by line.
        self.values: dict[str, list[dict[str, float]]] = {}
        self._left = _MOST_LINES
        self._last: dict[int, int] = {}
        # Imports of libraries call functions by the million.
        self._followed: dict[str, bool] = {}

    def install(self) -> None:
        """Begins to follow this thread, including the functions that run already."""
        self.recorder.add("branches", lines=self.lines, steps=self.steps, values=self.values)
        for frame in user_frames():
            frame.f_trace = self._on_line
        if threading.current_thread() is threading.main_thread():
            sys.settrace(self._on_call)

    def _on_call(self, frame: Any, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        followed = self._followed.get(path)
        if followed is None:
            followed = self._followed[path] = is_user_file(path)
        return self._on_line if followed and self._left > 0 else None

    def _on_line(self, frame: Any, event: str, arg: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            sys.settrace(None)
            return None
        known = self._last.get(id(frame))
        if event == "line":
            if known is not None:
                self._follow(frame, known, frame.f_lineno)
            self._last[id(frame)] = frame.f_lineno
            self._read(frame)
        elif event == "return" and known is not None:
            # A frame ends after its last line.
            self._follow(frame, known, 0)
            del self._last[id(frame)]
        return self._on_line

    def _follow(self, frame: Any, line: int, following: int) -> None:
        place = f"{frame.f_code.co_filename}:{line}"
        times = self.lines.setdefault(place, [])
        if len(times) < _MOST_TIMES:
            times.append(following)
            self.steps[place] = self.recorder.step

    def _read(self, frame: Any) -> None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        operands = operands_of_file(path).get(line)
        if operands:
            times = self.values.setdefault(f"{path}:{line}", [])
            if len(times) < _MOST_TIMES:
                times.append(values_of(operands, frame))
