"""Compares what the ranks of a run have recorded. Imports no torch."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ddp_doctor.findings import Finding, Report, Verdict, listed

# Part of an epoch that two ranks may share: a sampler pads the last batch with samples of the first.
_SHARED, _FEWEST = 0.02, 64
# Samples by which the order of two epochs is compared.
_ORDER = 16


class WatchedRanks:
    """The records of all ranks, as far as they have been read.

    Args:
        folder: The folder of the records.
        tell: What is called with each finding at its first sight.

    Attributes:
        findings: The findings so far, by code and what they are about.
        ends: The last record of each rank that has ended.
        last: The last recorded step of each rank.
        compared: How often all ranks were compared.
    """

    def __init__(self, folder: Path, tell: Callable[[Finding], None] = lambda _: None) -> None:
        self.folder, self.tell, self.compared = folder, tell, 0
        self.findings: dict[tuple[str, str], Finding] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self.last: dict[int, int] = {}
        self._read: dict[Path, int] = defaultdict(int)
        # By optimizer and step, the records of the ranks.
        self._open: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        # By optimizer, the first record of a rank.
        self._first: dict[int, dict[str, Any]] = {}
        # Optimizers whose weights were once equal, and ranks whose model was once in training mode.
        self._equal: set[int] = set()
        self._trained: set[int] = set()
        # By loader and epoch, the samples of each rank, as the keys of a dictionary, which are in order.
        self._samples: dict[tuple[int, int], dict[int, dict[int, None]]] = defaultdict(lambda: defaultdict(dict))

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
            self._found("LD028", message, counts[few])
        report = Report(str(self.folder), max(len(self.last), 1), [*self.findings.values()])
        (self.folder / "watch.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
        return report

    def _take(self, rank: int, record: dict[str, Any]) -> None:
        for epoch in record["epochs"]:
            self._take_epoch(rank, epoch)
        if "end" in record:
            self.ends[rank] = record
            return
        number, step = record["optimizer"], record["step"]
        if step == 0:
            first = self._first.setdefault(number, record)
            # A sharded optimizer steps another one with its own shard.
            first["sharded"] |= first["names"] != record["names"]
        self.last[rank] = max(self.last.get(rank, 0), step)
        if not record["eval"]:
            self._trained.add(rank)
        elif rank in self._trained:
            message = f"The model of rank {rank} is in evaluation mode in training, first seen at step {step}."
            self._found("LD021", message, step)
        self._open[number, step][rank] = record
        if len(self._open[number, step]) == len(self.last) > 1:
            self._compare(number, step, self._open.pop((number, step)))
            for old in [key for key in self._open if key[0] == number and key[1] < step]:
                # A rank that records less often has no record of this step.
                del self._open[old]

    def _compare(self, number: int, step: int, records: dict[int, dict[str, Any]]) -> None:
        self.compared += 1
        rates = [f"rank {rank}: {record['lr']}" for rank, record in sorted(records.items())]
        if any(record["lr"] != records[min(records)]["lr"] for record in records.values()):
            message = f"The learning rates of the ranks differ at step {step} ({', '.join(rates)})."
            self._found("LD017", message, step, key=str(number))
        weights = [record.get("weights", []) for record in records.values()]
        if weights[0] and len(set(map(len, weights))) == 1:
            different = [place for place, values in enumerate(zip(*weights, strict=True)) if len(set(values)) > 1]
            self._compare_weights(number, step, different)

    def _compare_weights(self, number: int, step: int, different: list[int]) -> None:
        key = ("LD011", str(number))
        if not different:
            self._equal.add(number)
            if key in self.findings and self.findings[key].verdict is Verdict.FAULT:
                text = f"{self.findings[key].message} At step {step} they were equal again: they are averaged."
                self.findings[key] = replace(self.findings[key], verdict=Verdict.NOTE, message=text)
            return
        first = self._first[number]
        if first["sharded"] or not (first["wrapped"] or number in self._equal):
            # Ranks that hold different parts of one model.
            return
        found = [first["names"][place] for place in different]
        since = f"first seen at step {step}" if number in self._equal else "from the first record on"
        message = f"The weights of the ranks differ, {since}: {listed(found)}."
        self._found(key[0], message, step, key=key[1], tensor=found[0])

    def _take_epoch(self, rank: int, epoch: dict[str, Any]) -> None:
        loader, number = epoch["loader"], epoch["epoch"]
        ranks = self._samples[loader, number]
        ranks[rank] |= dict.fromkeys(epoch["samples"])
        self._samples.pop((loader, number - 2), None)
        epochs = self._samples[loader, number - 1][rank], ranks[rank]
        before, now = (list(islice(samples, _ORDER)) for samples in epochs)
        if epoch["shuffles"] and before == now and len(now) == _ORDER:
            message = f"Rank {rank} takes the samples of epochs {number - 1} and {number} in the same order."
            self._found("LD001", message, key=str(loader))
        for other in ranks.keys() - {rank}:
            shared = ranks[other].keys() & ranks[rank].keys()
            smaller = min(len(ranks[other]), len(ranks[rank]))
            if smaller >= _FEWEST and len(shared) > max(2 * len(ranks), _SHARED * smaller):
                some = listed(list(map(str, sorted(shared))))
                message = (
                    f"Ranks {min(rank, other)} and {max(rank, other)} take the same samples in epoch {number}: "
                    f"{len(shared)} of the {smaller} that were compared, such as {some}."
                )
                self._found("LD002", message, key=str(loader))

    def _found(self, code: str, message: str, step: int | None = None, *, key: str = "", tensor: str = "") -> None:
        if (code, key) not in self.findings:
            self.findings[code, key] = found = Finding(code, Verdict.FAULT, message, step, tensor)
            self.tell(found)
