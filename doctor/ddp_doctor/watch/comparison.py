"""Compares what the ranks of a run have recorded. Imports no torch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_doctor.findings import Finding, Report, Verdict, listed

# Records in a row without a gradient after which it counts as lost, and with equal random numbers.
_LOST = 3
# Part of an epoch that two ranks may share: a sampler pads the last batch with samples of the first.
_SHARED, _FEWEST = 0.02, 64


def said(finding: Finding) -> str:
    """Returns a finding in one line."""
    return f"ddp-doctor watch: {finding.verdict.value}: {finding.code}: {finding.message}"


class Comparison:
    """The records of all ranks, as far as they have been read.

    Args:
        folder: The folder of the records.
        tell: What is called with each finding at its first sight.
        ranks: Number of ranks; by default as many as have written records.

    Attributes:
        findings: The findings so far.
        ends: The last record of each rank that has ended.
        last: The last recorded step of each rank.
        compared: How often all ranks were compared.
    """

    def __init__(self, folder: Path, tell: Callable[[Finding], None] | None = None, ranks: int = 0) -> None:
        self.folder, self.tell, self.expected, self.compared = folder, tell, ranks, 0
        self.findings: dict[tuple[str, str], Finding] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self.last: dict[int, int] = {}
        self._read: dict[Path, int] = defaultdict(int)
        # By optimizer and step, the records of the ranks.
        self._open: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        # By optimizer, the first record of a rank.
        self._first: dict[int, dict[str, Any]] = {}
        self._averaged = False
        # Optimizers whose weights were once equal, and the random numbers that all ranks had.
        self._equal: set[int] = set()
        self._random: dict[int, dict[int, str]] = defaultdict(dict)
        self._trained: set[int] = set()
        # By optimizer, rank and parameter, the records without a gradient since the last one with it.
        self._missing: dict[tuple[int, int, int], int] = {}
        self._samples: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._orders: dict[tuple[int, int, int], str] = {}

    def read(self) -> None:
        """Reads what is new."""
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] += len(line)
                    self._take(int(path.stem.removeprefix("rank")), json.loads(line))

    def finish(self) -> Report:
        """Compares the rest, writes `watch.json`, and returns the report."""
        self.read()
        counts = {rank: max(end["steps"], default=0) for rank, end in self.ends.items() if not end["end"]}
        if len(set(counts.values())) > 1:
            few = min(counts, key=lambda rank: counts[rank])
            message = f"Rank {few} ended after {counts[few]} optimizer steps, and another after {max(counts.values())}."
            self._found("LD028", Verdict.FAULT, message, counts[few])
        report = Report(str(self.folder), max(len(self.last), 1), [*self.findings.values()])
        (self.folder / "watch.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
        return report

    def _take(self, rank: int, record: dict[str, Any]) -> None:
        for epoch in record.get("epochs", ()):
            self._take_epoch(rank, epoch)
        if "end" in record:
            self.ends[rank] = record
            return
        number, step = record["optimizer"], record["step"]
        if step == 0:
            self._first.setdefault(number, record)
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
        if all(other["random"] == first["random"] for other in others):
            self._random[number][step] = first["random"]
            states = list(self._random[number].values())
            if len(states) > _LOST and len(set(states)) == len(states):
                message = (
                    "All ranks draw the same random numbers: dropout masks and noise are equal on all of them, unless "
                    "the samples' numbers come from elsewhere."
                )
                self._found("LD008", Verdict.NOTE, message, min(self._random[number]))
        weights = [record.get("weights", []) for record in (first, *others)]
        if weights[0] and len({len(own) for own in weights}) == 1:
            places = [place for place, values in enumerate(zip(*weights, strict=True)) if len(set(values)) > 1]
            self._compare_weights(number, step, places)

    def _compare_weights(self, number: int, step: int, different: list[int]) -> None:
        key = ("LD011", f"weights{number}")
        if not different:
            self._equal.add(number)
            if key in self.findings and self.findings[key].verdict is not Verdict.NOTE:
                text = f"{self.findings[key].message} At step {step} they were equal again: they are averaged."
                self.findings[key] = replace(self.findings[key], verdict=Verdict.NOTE, message=text)
            return
        begun = self._first.values()
        if any(first["sharded"] for first in begun) or (
            number not in self._equal and not any(first["wrapped"] for first in begun)
        ):
            # Ranks that hold different parts of one model.
            return
        first = self._first.get(number, {"names": [], "group": 1})
        found = [name for place in different for name in first["names"][place * first["group"] :][:1]]
        since = "from the first record on" if number not in self._equal else f"first seen at step {step}"
        verdict = Verdict.NOTE if self._averaged else Verdict.FAULT
        message = f"The weights of the ranks differ, {since}: {listed(found)}."
        self._found(key[0], verdict, message, step, key=key[1], tensor=found[0] if found else "")

    def _take_mode(self, rank: int, record: dict[str, Any]) -> None:
        if not record["eval"]:
            self._trained.add(rank)
        elif rank in self._trained:
            message = (
                f"The model of rank {rank} is in evaluation mode in training, first seen at step {record['step']}."
            )
            self._found("LD021", Verdict.FAULT, message, record["step"], key="mode")

    def _take_lost(self, rank: int, record: dict[str, Any]) -> None:
        number, names = record["optimizer"], self._first.get(record["optimizer"], {"names": []})["names"]
        for place, name in enumerate(names):
            key = (number, rank, place)
            if place not in record["lost"]:
                self._missing[key] = 0
                self.findings.pop(("LD009", f"{number}:{place}"), None)
            elif key in self._missing:
                self._missing[key] += 1
                if self._missing[key] == _LOST:
                    message = f"{name} has had no gradient on rank {rank} for {_LOST} records; it had one before."
                    self._found("LD009", Verdict.FAULT, message, record["step"], key=f"{number}:{place}", tensor=name)

    def _take_epoch(self, rank: int, epoch: dict[str, Any]) -> None:
        loader, number = epoch["loader"], epoch["epoch"]
        ranks = self._samples[loader, number]
        ranks[rank].update(epoch.get("samples", ()))
        for old in [other for other in self._samples if other[0] == loader and other[1] < number - 1]:
            del self._samples[old]
        if "order" in epoch:
            self._orders[loader, rank, number] = epoch["order"]
            if self._orders.pop((loader, rank, number - 1), "") == epoch["order"]:
                message = f"Rank {rank} takes the samples of epochs {number - 1} and {number} in the same order."
                self._found("LD001", Verdict.FAULT, message, key=f"order{loader}")
        for other in ranks.keys() - {rank}:
            shared = ranks[other] & ranks[rank]
            smaller = min(len(ranks[other]), len(ranks[rank]))
            if smaller >= _FEWEST and len(shared) > max(2 * len(ranks), _SHARED * smaller):
                some = listed(list(map(str, sorted(shared))))
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
