"""What the ranks of a run recorded, and why a run failed, in the words of the user's own program."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_doctor.lazy import torch
from ddp_doctor.records.spec import PACKAGE, Spec

# What a rank says when it has lost another one.
_CONSEQUENCE = re.compile(r"(closed|reset) by peer|Broken pipe|gloo/transport|Timed out waiting|Connection refused")
# What torchrun prints about a rank that has failed, after what the rank has printed.
_AGENT = re.compile(r"^.*torch.distributed.elastic.multiprocessing.api", re.MULTILINE)
# Where the folder of an examination has a copy of the current folder, under its absolute path; see `folder_copy`.
COPY = Path("copy", "files")
_NO_END = {"reached_end": False, "shortened": False, "failures": [], "imported": ([], {})}


@dataclass
class RankRecord:
    """What one rank recorded, and printed as its `output`.

    Attributes:
        stack: The stacks of its threads if it hung.
        code: Its exit code; None for a rank that was stopped after it had recorded everything.
        journal: Its collectives and passes, in order, which are also known of a lost rank.
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
        return next(iter(self.of_kind("end")), _NO_END)

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
        """The other iterations of loaders, in order, apart from those of a prediction."""
        return [event for event in self.of_kind("epoch") if not event["trains"] and not event.get("predicts")]


@dataclass
class Run:
    """One run in its folder: what was to be done, and its ranks, in order.

    Attributes:
        hung: Whether it was stopped after the timeout.
        later: What was recorded after the numbers, if the program was to train on; otherwise None.
    """

    spec: Spec
    folder: Path
    ranks: list[RankRecord] = field(default_factory=list)
    hung: bool = False
    seconds: float = 0.0
    later: Run | None = None

    def __post_init__(self) -> None:
        """Names the files of a copy as the user has them."""
        root = str(self.folder.parent / COPY)
        if Path(root).exists():
            for rank in self.ranks:
                rank.output, rank.stack = _named(rank.output, root), _named(rank.stack, root)
                rank.events, rank.journal = _named(rank.events, root), _named(rank.journal, root)

    def tensors(self, name: str) -> list[torch.Tensor]:
        """Returns a recorded tensor of every rank; empty if a rank has none of this name."""
        found = [rank.tensors[name] for rank in self.ranks if name in rank.tensors]
        return found if len(found) == len(self.ranks) else []

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The exceptions of the ranks, first those that are no consequence of a lost connection."""
        return [rank.error for rank in self._by_cause() if rank.error]

    def _by_cause(self) -> list[RankRecord]:
        """Returns the ranks, those at the end that did not fail by themselves, or because another one was lost."""
        return sorted(self.ranks, key=lambda rank: not rank.error or bool(_CONSEQUENCE.search(rank.error["message"])))

    @property
    def lost(self) -> list[RankRecord]:
        """The ranks that ended without a record."""
        return [rank for rank in self.ranks if not rank.events]

    @property
    def ended_early(self) -> bool:
        """Whether all ranks ended with exit code 0, and recorded nothing."""
        return not self.hung and bool(self.ranks) and all(rank.code == 0 and not rank.events for rank in self.ranks)

    @property
    def started(self) -> int:
        """How many ranks the program has started, if it is known to be another number than was wanted; otherwise 0."""
        groups = [rank.of_kind("init_process_group") for rank in self.ranks]
        worlds = {events[0].get("world", self.spec.world_size) for events in groups if events}
        return max(worlds - {self.spec.world_size}, default=0)

    @property
    def worked(self) -> bool:
        """Whether every rank recorded what was wanted."""
        return not self.hung and not self.errors and not self.lost and bool(self.ranks) and not self.started

    @property
    def reason(self) -> str:
        """The traceback of the first rank that failed, or how the first one was lost."""
        for error in self.errors:
            return without_doctor(error["trace"]) or error["message"]
        return "\n".join([self.short_reason, *(rank.output[-2000:] for rank in self.lost[:1])])

    @property
    def short_reason(self) -> str:
        """Why the run failed in one line, such as `rank 1: ValueError: no data`."""
        for rank in self._by_cause():
            if rank.error:
                lines = rank.error["message"].strip().splitlines() or [""]
                where = f"rank {rank.rank}: " if len(self.ranks) > 1 else ""
                return f"{where}{rank.error['type']}: {lines[0][:200]}".rstrip(": ")
        if self.hung or not self.ranks:
            return "it hung" if self.hung else "it was not started"
        if self.started:
            return f"the program starts {self.started} ranks, although the doctor runs {self.spec.world_size}"
        lost = self.lost[0]
        last = next(iter(reversed(lost.output.strip().splitlines())), "")[:200]
        code = "" if lost.code is None else f" with exit code {lost.code}"
        return f"rank {lost.rank} ended early{code}" + (f": {last}" if last else "")

    @property
    def stacks(self) -> str:
        """Where each rank failed, waited or hung."""
        found = []
        for rank in self._by_cause():
            if rank.error:
                found.append(f"Rank {rank.rank} failed:\n{without_doctor(rank.error['trace'])}")
            elif rank.stack:
                step = max((event["step"] for event in [*rank.events, *rank.journal]), default=0)
                # The thread that runs the user's code, without the doctor's frames.
                threads = [part for part in rank.stack.split("\n\n") if f"{PACKAGE}/probes/install.py" not in part]
                lines = [line for part in threads for line in part.splitlines() if PACKAGE not in line]
                shown = "\n".join(lines).strip("\n") or "  It has no stack."
                found.append(f"Rank {rank.rank} waited or hung in step {step}:\n{shown}")
            elif rank.code is not None and not rank.events:
                how = f"was killed by signal {-rank.code}" if rank.code < 0 else f"exited with code {rank.code}"
                found.append(f"Rank {rank.rank} {how}.\n{rank.output[-1500:]}")
        return "\n".join(found)


def _named(value: Any, root: str) -> Any:
    """Returns a nested value with the paths of a copy as those of the user."""
    if isinstance(value, str):
        return value.replace(f"{root}/", "/")
    if isinstance(value, dict):
        return {key: _named(part, root) for key, part in value.items()}
    return type(value)(_named(part, root) for part in value) if type(value) in {list, tuple, set} else value


def without_doctor(trace: str) -> str:
    """Returns a traceback without the frames of the doctor and of imports, which are between those of the user."""
    lines, inside = [], False
    for line in trace.splitlines():
        if line.startswith('  File "'):
            inside = line.startswith((f'  File "{PACKAGE}/', '  File "<frozen importlib'))
        elif not line.startswith("    "):
            inside = False
        if not inside:
            lines.append(line)
    return "\n".join(lines)


def load_run(spec: Spec, folder: Path, codes: Sequence[int | None], seconds: float, *, hung: bool) -> Run:
    """Returns a run, whose ranks ended with these exit codes, and what follows its numbers."""

    def load(part: str = "") -> Run:
        ranks = [load_record(folder, rank, code, part) for rank, code in enumerate(codes)]
        ended = all(rank.of_kind("end") for rank in ranks)
        return Run(spec, folder, ranks, hung and not ended, seconds)

    run = load()
    if spec.later:
        run.later = later = load("later")
        # What the program did before belongs to it, too.
        for rank, one in zip(later.ranks, run.ranks, strict=True):
            rank.tensors = one.tensors
    return run


def load_record(folder: Path, rank: int, code: int | None, part: str = "") -> RankRecord:
    """Returns what a rank recorded in a part of a run, which is nothing if it was lost."""
    path = folder / f"{part}rank{rank}.pt"
    # The tensors of all runs need not be in memory at once.
    loaded: dict[str, Any] = {"events": [], "tensors": {}}
    with warnings.catch_warnings():
        # torch says that it examines sparse tensors, such as gradients of the program.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        if path.exists():
            loaded = torch.load(path, "cpu", weights_only=False, mmap=True)
    names = (f"output{rank}.txt", "output.txt", f"stack{rank}.txt", f"journal{rank}.jsonl")
    own, common, stack, lines = (_text(folder / name) for name in names)
    # The last line of a process that was killed may be incomplete.
    journal = [json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith("\n")]
    output = _AGENT.split(own or common, maxsplit=1)[0]
    return RankRecord(rank, loaded["events"], loaded["tensors"], output, stack, code, journal)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
