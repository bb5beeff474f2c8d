"""Probe of the numbers that the program reports: printed, logged, or written as text, JSON, CSV or for TensorBoard."""

from __future__ import annotations

import builtins
import csv
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.after_import import AfterImport
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder, is_called_by_user, is_called_near_user, user_stack

_NUMBER = re.compile(r"-?\d+\.\d+(?:[eE][+-]?\d+)?")
# Added to the word of a number in parentheses.
BRACKETED = " in parentheses"
_MOST_EVENTS = 2_000


class ReportProbe:
    """Records the numbers with a fraction that the user's code reports."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._left = _MOST_EVENTS

    def install(self) -> None:
        """Installs the probes."""
        wrap(builtins, "print", self._on_print)
        wrap(logging.Logger, "_log", self._on_log)
        for name in ("dump", "dumps"):
            before(json, name, lambda values, *_, **__: self._on_write(values))
        for owner, name in ((csv.DictWriter, "writerow"), (Path, "write_text")):
            before(owner, name, lambda _, values, *__, **___: self._on_write(values))
        change: dict[str, Callable[[Any], None]] = {"torch.utils.tensorboard.writer": self._watch_writer}
        sys.meta_path.insert(0, AfterImport(change))

    def _watch_writer(self, module: Any) -> None:
        wrap(module.SummaryWriter, "add_scalar", self._on_scalar)

    def _on_print(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_called_near_user():
            self._report(args)
        return original(*args, **kwargs)

    def _on_write(self, values: Any) -> None:
        if is_called_by_user():
            self._report([values])

    def _on_log(self, original: Callable[..., Any], logger: Any, level: int, msg: Any, args: Any, **kwargs: Any) -> Any:
        if is_called_near_user():
            with suppress(TypeError, ValueError):
                self._report([str(msg) % args if args else str(msg)])
        return original(logger, level, msg, args, **kwargs)

    def _on_scalar(self, original: Callable[..., Any], writer: Any, tag: str, value: Any, *args: Any, **kw: Any) -> Any:
        self._report([value], tag, by_trainer=_is_called_by_trainer())
        return original(writer, tag, value, *args, **kw)

    def _report(self, values: Any, name: str = "", *, by_trainer: bool = False) -> None:
        numbers = list(_numbers(values))
        if numbers and self._left:
            self._left -= 1
            key = " ".join([*user_stack(), name])
            self.recorder.add("reported", key=key, values=numbers, name=name, by_trainer=by_trainer)


def _is_called_by_trainer() -> bool:
    """Returns whether Lightning's Trainer writes what `self.log` was given."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("logger_connector.py"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _numbers(value: Any, depth: int = 0) -> Iterator[tuple[float, float, str]]:
    """Yields each number with a fraction, what rounding may change it by, and the word before it."""
    if isinstance(value, float):
        yield value, abs(value) * 1e-6, ""
    elif isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.is_floating_point():
            yield float(value), abs(float(value)) * 1e-6, ""
    elif isinstance(value, str):
        for found in _NUMBER.finditer(value):
            mantissa, _, exponent = found[0].lower().partition("e")
            digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
            words = re.findall(r"[A-Za-z_][\w ]*", value[: found.start()])
            word = words[-1].strip() if words else ""
            is_bracketed = (
                value[found.start() - 1 : found.start()] == "(" and value[found.end() : found.end() + 1] == ")"
            )
            yield float(found[0]), 1.01 * 10.0**-digits, word + BRACKETED * is_bracketed
    elif isinstance(value, dict) and depth < 3:
        for key, part in value.items():
            for number, rounding, word in _numbers(part, depth + 1):
                yield number, rounding, word or str(key)
    elif isinstance(value, list | tuple) and depth < 3:
        word = ""
        for part in list(value)[:100]:
            if isinstance(part, str) and not _NUMBER.search(part):
                word = part.strip(" :=")
            for number, rounding, own in _numbers(part, depth + 1):
                yield number, rounding, own or word
