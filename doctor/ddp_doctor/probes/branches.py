"""The branches that the user's code takes, and the numbers that its conditions read, on each rank."""

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
# A program that runs more lines in Python is not followed further.
_MOST_LINES = 300_000
_MOST_TIMES = 100


@cache
def operands_of_file(path: str) -> dict[int, list[ast.expr]]:
    """Returns what the conditions of a file compare, or pass to a call, by the line of the condition."""
    with suppress(OSError, SyntaxError, ValueError):
        nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.If | ast.While)]
        return {node.lineno: list(_operands(node.test)) for node in nodes}
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
        yield from (node for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute))


def _value(node: ast.expr, frame: Any) -> Any:
    """Returns the value of a name, or of an attribute of an object, without asking the object."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        with suppress(TypeError):
            return vars(_value(node.value, frame)).get(node.attr)
    return None


class BranchProbe:
    """Records each evaluation of a condition of the user's code, as long as the code is not too busy."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # By line: steps and collectives before each time, the line `then` that follows, and the numbers that are read.
        self.times: dict[str, list[dict[str, Any]]] = {}
        self._left = _MOST_LINES
        # The condition that each frame evaluates.
        self._open: dict[int, dict[str, Any]] = {}

    def install(self) -> None:
        """Begins to follow this thread, including the functions that run already."""
        self.recorder.add("branches", times=self.times)
        for frame in user_frames():
            frame.f_trace = self._on_line
        if threading.current_thread() is threading.main_thread():
            sys.settrace(self._on_call)

    def _on_call(self, frame: Any, event: str, arg: Any) -> Any:
        return self._on_line if is_user_file(frame.f_code.co_filename) else None

    def _on_line(self, frame: Any, event: str, arg: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            sys.settrace(None)
            return None
        if event != "exception" and (time := self._open.pop(id(frame), None)):
            # A frame ends after its last line.
            time["then"] = frame.f_lineno if event == "line" else 0
            if self.recorder.collectives > time["collectives"]:
                # The condition has combined its numbers over the ranks.
                time["reads"] = {}
        path, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and (operands := operands_of_file(path).get(line)) is not None:
            times = self.times.setdefault(f"{path}:{line}", [])
            if len(times) < _MOST_TIMES:
                now = {"step": self.recorder.step, "collectives": self.recorder.collectives}
                times.append({**now, "then": None, "reads": values_of(operands, frame)})
                self._open[id(frame)] = times[-1]
        return self._on_line
