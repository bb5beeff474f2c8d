"""Training of one rank while the others wait, such as that of a teacher: it is no part of what the ranks train."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

# What is kept of the time before the ranks train together.
_KEPT = {"init_process_group", "seed", "open", "save", "lock", "collective", "scaler", "ddp"}
_MOST_SECONDS = 5.0


class AloneProbe:
    """Sees whether this rank trains while another one, which has not trained yet, waits for it in a collective.

    Attributes:
        steps: The optimizer steps that this rank has taken alone.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self._others = recorder, spec.world_size - 1
        self.steps = 0
        self._together = self._others == 0

    def is_alone(self) -> bool:
        """Returns whether another rank waits for this one; ranks that have trained together are never alone again."""
        if self._together:
            return False
        own = sum(event["kind"] == "collective" for event in self.recorder.events)
        journals = [_journal(self.recorder.folder / f"journal{rank}.jsonl") for rank in self._ranks()]
        if any("backward" in kinds for kinds in journals):
            self._together = True
        return not self._together and any(kinds[-1:] == ["collective"] and len(kinds) > own for kinds in journals)

    def is_alone_soon(self) -> bool:
        """Returns the same, after a while in which another rank may begin to train or to wait."""
        latest = time.monotonic() + _MOST_SECONDS
        while not (alone := self.is_alone()) and not self._together and time.monotonic() < latest:
            time.sleep(0.05)
        return alone

    def forget(self) -> None:
        """Removes what this rank has recorded while it was alone."""
        recorder = self.recorder
        recorder.events[:] = [event for event in recorder.events if event["kind"] in _KEPT]
        recorder.tensors.clear()
        recorder.add("alone", steps=self.steps)
        recorder.step = recorder.backwards = self.steps = 0

    def _ranks(self) -> list[int]:
        return [rank for rank in range(self._others + 1) if rank != self.recorder.rank]


def _journal(path: Path) -> list[str]:
    """Returns the kinds of the events that a rank has written so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["kind"] for line in lines if line.endswith("}")]
