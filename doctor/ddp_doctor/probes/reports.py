"""Probe of the numbers that the program reports: printed, logged, or written as text, JSON, CSV or for TensorBoard."""

import builtins
import csv
import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.after_import import after_import
from ddp_doctor.probes.wrap import before
from ddp_doctor.records.recorder import Recorder, frames, is_called_by_user, is_called_near_user, user_stack
from ddp_doctor.records.spec import BRACKETED

_NUMBER = re.compile(r"-?\d+\.\d+(?:[eE][+-]?\d+)?")


class ReportProbe:
    """Records the numbers with a fraction that the user's code reports."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def install(self) -> None:
        """Installs the probes."""
        before(builtins, "print", self._on_print)
        before(logging.Logger, "_log", self._on_log)
        for owner, name in ((json, "dump"), (json, "dumps"), (csv.DictWriter, "writerow"), (Path, "write_text")):
            before(owner, name, self._on_write)
        writer = "torch.utils.tensorboard.writer"
        after_import({writer: lambda module: before(module.SummaryWriter, "add_scalar", self._on_scalar)})

    def _on_print(self, *args: Any, **_: Any) -> None:
        if is_called_near_user():
            self._report(args)

    def _on_write(self, *args: Any, **kwargs: Any) -> None:
        if is_called_by_user():
            self._report([*args, *kwargs.values()])

    def _on_log(self, logger: Any, level: int, msg: Any, args: Any, **_: Any) -> None:
        if is_called_near_user():
            with suppress(TypeError, ValueError):
                self._report([str(msg) % args if args else str(msg)])

    def _on_scalar(self, writer: Any, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        # Lightning's Trainer writes what `self.log` was given.
        by_trainer = any(frame.f_code.co_filename.endswith("logger_connector.py") for frame in frames())
        self._report([scalar_value], tag, by_trainer=by_trainer)

    def _report(self, values: Any, name: str = "", *, by_trainer: bool = False) -> None:
        numbers = list(_numbers(values))
        if numbers:
            key = " ".join([*user_stack(), name])
            self.recorder.add("reported", key=key, values=numbers, name=name, by_trainer=by_trainer)


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
