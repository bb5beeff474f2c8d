"""What ranks hold beside the weights that they train: teachers, targets and averages, and buffers such as a queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import RankRecord


@dataclass(frozen=True)
class Held:
    """A network whose weights differ between the ranks that call it.

    Attributes:
        module: Name of its class.
        ranks: The first two ranks that differ.
        step: The optimizer steps before.
        place: Where the user's code calls it.
    """

    module: str
    ranks: tuple[int, int]
    step: int
    place: str


def held_differently(evidence: Evidence) -> Held | None:
    """Returns the first call of a network that all ranks make with different weights, or None."""
    for calls in zip(*(_calls(rank) for rank in evidence.trained), strict=False):
        first = calls[0]
        if any(_key(call) != _key(first) for call in calls):
            # The ranks call other networks, so that their calls cannot be compared.
            return None
        for rank, call in enumerate(calls):
            if call["held"] != first["held"]:
                return Held(first["module"], (0, rank), first["step"], first["place"])
    return None


def buffer_of_each_rank(evidence: Evidence) -> tuple[str, bool] | None:
    """Returns the first buffer in which a step has left other values on each rank, or None.

    The second value is whether DistributedDataParallel replaces it with that of rank 0. Buffers of batch norm do not
    count: LD012 reports them.
    """
    for calls in zip(*(rank.of_kind("forward") for rank in evidence.trained), strict=False):
        first = calls[0].get("buffers") or {}
        if any((call["module"], call["step"]) != (calls[0]["module"], calls[0]["step"]) for call in calls):
            return None
        for name, value in first.items():
            if any(call["buffers"].get(name, value) != value for call in calls):
                broadcast = any(event["buffers"] for event in evidence.trained[0].of_kind("ddp_forward"))
                return name, broadcast
    return None


def _calls(record: RankRecord) -> Iterator[dict[str, Any]]:
    return (event for event in record.of_kind("forward") if event.get("held"))


def _key(call: dict[str, Any]) -> tuple[str, str, int]:
    return call["module"], call["place"], call["step"]
