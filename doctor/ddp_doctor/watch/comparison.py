"""Compares what the ranks of a run have recorded. Imports no torch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_doctor.findings import Finding, Report, Verdict, listed

# Records in a row without a gradient after which it counts as lost.
_LOST = 3
# Part of an epoch that two ranks may share: a sampler pads the last batch with samples of the first.
_SHARED = 0.02


class Comparison:
    """The records of all ranks, as far as they have been read.

    Args:
        folder: The folder of the records.
        tell: What is called with each finding at its first sight.
        ranks: Number of ranks; by default as many as have written records.

    Attributes:
        findings: The findings so far.
    """

    def __init__(self, folder: Path, tell: Callable[[Finding], None] | None = None, ranks: int = 0) -> None:
        self.folder, self.tell, self.expected = folder, tell, ranks
        self.findings: dict[tuple[str, str], Finding] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self.last: dict[int, int] = {}
        self._read: dict[Path, int] = {}
        # By optimizer and step, the records of the ranks.
        self._open: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        self._names: dict[int, list[str]] = {}
        self._group: dict[int, int] = {}
        self._wrapped = self._sharded = self._averaged = False
        self._equal: set[int] = set()
        self._random: dict[int, dict[int, str]] = defaultdict(dict)
        self._had: dict[tuple[int, int, int], bool] = {}
        self._missing: dict[tuple[int, int, int], int] = {}
        self._samples: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._orders: dict[tuple[int, int, int], str] = {}
        self.compared = 0

    def read(self) -> None:
        """Reads what is new."""
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] = self._read.get(path, 0) + len(line)
                    self._take(int(path.stem.removeprefix("rank")), json.loads(line))

    def finish(self) -> Report:
        """Compares the rest, writes `watch.json`, and returns the report."""
        self.read()
        counts = {rank: max(end["steps"], default=0) for rank, end in self.ends.items() if not end["end"]}
        if len(set(counts.values())) > 1:
            few = min(counts, key=lambda rank: counts[rank])
            message = f"Rank {few} ended after {counts[few]} optimizer steps, and another after {max(counts.values())}."
            self._found("LD028", Verdict.FAULT, message, counts[few])
        report = self.report()
        (self.folder / "watch.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
        return report

    def report(self) -> Report:
        """Returns the findings as a report."""
        return Report(str(self.folder), max(len(self.last), 1), [*self.findings.values()])

    def _take(self, rank: int, record: dict[str, Any]) -> None:
        for epoch in record.get("epochs", ()):
            self._take_epoch(rank, epoch)
        if "end" in record:
            self.ends[rank] = record
            return
        number, step = record["optimizer"], record["step"]
        if step == 0:
            self._names.setdefault(number, record["names"])
            self._group[number] = record["group"]
            self._wrapped |= record["wrapped"]
            self._sharded |= record["sharded"]
        self._averaged |= record["averaged"]
        self.last[rank] = max(self.last.get(rank, 0), step)
        self._take_mode(rank, record)
        self._take_lost(rank, record)
        self._open[number, step][rank] = record
        known = max(self.expected, len(self.last))
        if known > 1 and len(self._open[number, step]) == known:
            self._compare(number, step, self._open.pop((number, step)))
            for old in [key for key in self._open if key[0] == number and key[1] < step]:
                # A rank that records less often has no record of this step.
                del self._open[old]

    def _compare(self, number: int, step: int, records: dict[int, dict[str, Any]]) -> None:
        self.compared += 1
        first, *others = (records[rank] for rank in sorted(records))
        if any(other["lr"] != first["lr"] for other in others):
            values = ", ".join(f"rank {rank}: {records[rank]['lr']}" for rank in sorted(records))
            message = f"The learning rates of the ranks differ at step {step} ({values})."
            self._found("LD017", Verdict.FAULT, message, step, key=f"lr{number}")
        states = [record["random"] for record in records.values()]
        if len(set(states)) == 1:
            self._random[number][step] = states[0]
            before = [state for at, state in self._random[number].items() if at < step]
            if len(before) >= _LOST and len({*before, states[0]}) == len(before) + 1:
                message = (
                    "All ranks draw the same random numbers: dropout masks and noise are equal on all of them, unless "
                    "the samples' numbers come from elsewhere."
                )
                self._found("LD008", Verdict.NOTE, message, min(self._random[number]))
        self._compare_weights(number, step, [record.get("weights") for record in records.values()])

    def _compare_weights(self, number: int, step: int, weights: list[Any]) -> None:
        first, *others = weights
        if first is None or self._sharded or any(other is None or len(other) != len(first) for other in others):
            return
        different = [place for place in range(len(first)) if any(other[place] != first[place] for other in others)]
        key = ("LD011", f"weights{number}")
        if not different:
            self._equal.add(number)
            if key in self.findings and self.findings[key].verdict is not Verdict.NOTE:
                text = f"{self.findings[key].message} At step {step} they were equal again: they are averaged."
                self.findings[key] = replace(self.findings[key], verdict=Verdict.NOTE, message=text)
            return
        if number not in self._equal and not self._wrapped:
            # Ranks that hold different parts of one model.
            return
        names, size = self._names.get(number, []), self._group.get(number, 1)
        found = [names[place * size] for place in different if place * size < len(names)]
        since = "from the first record on" if number not in self._equal else f"first seen at step {step}"
        verdict = Verdict.NOTE if self._averaged else Verdict.FAULT
        message = f"The weights of the ranks differ, {since}: {listed(found)}."
        self._found(*key[:1], verdict, message, step, key=key[1], tensor=found[0] if found else "")

    def _take_mode(self, rank: int, record: dict[str, Any]) -> None:
        known = (-1, rank, -1)
        modules = record.get("eval")
        if modules is None:
            return
        if modules != [""]:
            self._had[known] = True
        elif self._had.get(known):
            message = (
                f"The model of rank {rank} is in evaluation mode in training, first seen at step {record['step']}."
            )
            self._found("LD021", Verdict.FAULT, message, record["step"], key="mode")

    def _take_lost(self, rank: int, record: dict[str, Any]) -> None:
        number, names = record["optimizer"], self._names.get(record["optimizer"], [])
        for place, name in enumerate(names):
            key = (number, rank, place)
            if place not in record["lost"]:
                self._had[key], self._missing[key] = True, 0
                self.findings.pop(("LD009", f"{number}:{place}"), None)
            elif self._had.get(key):
                self._missing[key] = self._missing.get(key, 0) + 1
                if self._missing[key] == _LOST:
                    message = f"{name} has had no gradient on rank {rank} for {_LOST} records; it had one before."
                    self._found("LD009", Verdict.FAULT, message, record["step"], key=f"{number}:{place}", tensor=name)

    def _take_epoch(self, rank: int, epoch: dict[str, Any]) -> None:
        loader, number = epoch["loader"], epoch["epoch"]
        key = (loader, number)
        ranks = self._samples[key]
        ranks[rank].update(epoch["samples"])
        for old in [other for other in self._samples if other[0] == loader and other[1] < number - 1]:
            del self._samples[old]
        if "order" in epoch:
            self._orders[loader, rank, number] = epoch["order"]
            if self._orders.pop((loader, rank, number - 1), "") == epoch["order"]:
                message = f"Rank {rank} takes the samples of epochs {number - 1} and {number} in the same order."
                self._found("LD001", Verdict.FAULT, message, key=f"order{loader}")
        for other, samples in ranks.items():
            shared = samples & ranks[rank]
            smaller = min(len(samples), len(ranks[rank]))
            if other != rank and smaller >= 64 and len(shared) > max(2 * len(ranks), _SHARED * smaller):
                some = listed([str(sample) for sample in sorted(shared)])
                message = (
                    f"Ranks {min(rank, other)} and {max(rank, other)} take the same samples in epoch {number}: "
                    f"{len(shared)} of the {smaller} that were compared, such as {some}."
                )
                self._found("LD002", Verdict.FAULT, message, key=f"shared{loader}")

    def _found(
        self, code: str, verdict: Verdict, message: str, step: int | None = None, *, key: str = "", tensor: str = ""
    ) -> None:
        if (code, key) not in self.findings:
            self.findings[code, key] = found = Finding(code, verdict, message, step, tensor)
            if self.tell is not None:
                self.tell(found)
