"""Networks that the ranks call without training them, such as teachers, targets and averages."""

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


def _calls(record: RankRecord) -> Iterator[dict[str, Any]]:
    return (event for event in record.of_kind("forward") if event.get("held"))


def _key(call: dict[str, Any]) -> tuple[str, str, int]:
    return call["module"], call["place"], call["step"]
