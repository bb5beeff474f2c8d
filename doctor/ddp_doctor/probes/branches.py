"""The branches that the user's code takes, and the numbers that its conditions read, on each rank."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.records.recorder import Recorder, is_user_file, user_frames

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
    """Returns the numbers among the operands, by their text. No code of the user is called."""
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
    # A part of `a and b` may not be reached.
    elif isinstance(test, ast.Compare | ast.Call) and not any(map(ast.unparse(test).lower().count, _NO_DECISIONS)):
        yield from (node for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript))


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
        # The last line of each frame, and the number of collectives before it.
        self._last: dict[int, tuple[int, int]] = {}
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
        if event != "exception" and (known := self._last.pop(id(frame), None)):
            # A frame ends after its last line.
            self._follow(frame, *known, frame.f_lineno if event == "line" else 0)
        if event == "line":
            self._last[id(frame)] = frame.f_lineno, self.recorder.collectives
            self._read(frame)
        return self._on_line

    def _follow(self, frame: Any, line: int, collectives: int, following: int) -> None:
        place = f"{frame.f_code.co_filename}:{line}"
        times = self.lines.setdefault(place, [])
        if len(times) < _MOST_TIMES:
            times.append(following)
            self.steps[place] = self.recorder.step
        if place in self.values and self.recorder.collectives > collectives:
            # The condition has combined its numbers over the ranks.
            self.values[place][-1] = {}

    def _read(self, frame: Any) -> None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        operands = operands_of_file(path).get(line)
        if operands:
            times = self.values.setdefault(f"{path}:{line}", [])
            if len(times) < _MOST_TIMES:
                times.append(values_of(operands, frame))
