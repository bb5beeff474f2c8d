"""Probe of the branches that the user's code takes: which line follows which, on each rank."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ddp_doctor.probes.operands import operands_of_file, values_of
from ddp_doctor.records.recorder import Recorder, is_user_file, user_frames

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
