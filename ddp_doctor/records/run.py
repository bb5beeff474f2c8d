"""What the ranks of a run recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.records.spec import Spec


@dataclass
class RankRecord:
    """What one rank recorded.

    Attributes:
        rank: Its number.
        events: Its events, in order.
        tensors: Its tensors.
        output: What it printed.
        stack: The stacks of its threads if it hung.
        code: Its exit code; None for a rank that was stopped after it had recorded everything.
        journal: Its collectives and passes, in order, which are known of a lost rank, too.
    """

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    output: str = ""
    stack: str = ""
    code: int | None = None
    journal: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of some kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def end(self) -> dict[str, Any]:
        """The last event: how the program ended."""
        return next(
            iter(self.of_kind("end")), {"reached_end": False, "initialized": False, "failures": [], "libraries": []}
        )

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that ended the program, if there was one."""
        return next(iter(self.of_kind("error")), None)

    @property
    def training_epochs(self) -> list[dict[str, Any]]:
        """The iterations of loaders in which the program trained, in order."""
        return [event for event in self.of_kind("epoch") if event["trains"]]

    @property
    def evaluation_epochs(self) -> list[dict[str, Any]]:
        """The other iterations of loaders, in order."""
        return [event for event in self.of_kind("epoch") if not event["trains"]]


@dataclass
class Run:
    """One run.

    Attributes:
        spec: What was to be done.
        folder: Its folder.
        ranks: The ranks, in order.
        hung: Whether it was stopped after the timeout.
        seconds: How long it took.
    """

    spec: Spec
    folder: Path
    ranks: list[RankRecord] = field(default_factory=list)
    hung: bool = False
    seconds: float = 0.0

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The exceptions of the ranks."""
        return [rank.error for rank in self.ranks if rank.error]

    @property
    def lost(self) -> list[RankRecord]:
        """The ranks that ended without a record."""
        return [rank for rank in self.ranks if not rank.events]

    @property
    def worked(self) -> bool:
        """Whether every rank recorded what was wanted."""
        return not self.hung and not self.errors and not self.lost and bool(self.ranks)


def load_record(folder: Path, rank: int, code: int | None) -> RankRecord:
    """Returns what a rank recorded, which is nothing if it was lost."""
    path = folder / f"rank{rank}.pt"
    loaded = torch.load(path, weights_only=True) if path.exists() else {"events": [], "tensors": {}}
    output, stack = _text(folder / f"output{rank}.txt"), _text(folder / f"stack{rank}.txt")
    # The last line of a process that was killed may be incomplete.
    lines = _text(folder / f"journal{rank}.jsonl").splitlines(keepends=True)
    journal = [json.loads(line) for line in lines if line.endswith("\n")]
    return RankRecord(rank, loaded["events"], loaded["tensors"], output, stack, code, journal)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
