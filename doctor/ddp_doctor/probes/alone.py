"""Training of one rank while the others wait, such as that of a teacher: it is no part of what the ranks train."""

import json
import time

from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

# What is kept of the time before the ranks train together.
_KEPT = {"init_process_group", "seed", "open", "save", "lock", "collective", "scaler", "ddp"}
_MOST_SECONDS = 5.0
# Seconds that a rank which has seen enough waits until it is known whether the others need it.
_MOST_SECONDS_AT_END = 15.0


class AloneProbe:
    """Sees whether this rank trains while another one, which has not trained yet, waits for it in a collective.

    Attributes:
        steps: The optimizer steps that this rank has taken alone.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self._others = recorder, spec.world_size - 1
        self.steps = 0
        self._together = self._others == 0

    def is_alone(self, *, soon: bool = False) -> bool:
        """Returns whether another rank waits for this one; ranks that have trained together are never alone again.

        Args:
            soon: Give another rank a while in which it may begin to train or to wait.
        """
        latest = time.monotonic() + _MOST_SECONDS * soon
        while not self._together:
            own, journals = self.recorder.collectives, self._journals().values()
            self._together = any("backward" in kinds for kinds in journals)
            if not self._together and any(kinds[-1:] == ["collective"] and len(kinds) > own for kinds in journals):
                return True
            if time.monotonic() >= latest:
                break
            time.sleep(0.05)
        return False

    def is_awaited(self) -> bool:
        """Returns whether this rank, which has seen enough, must train on because another one waits for it.

        Ranks that take unequal numbers of steps between their collectives, as in federated training, do not come to
        the same step together.
        """
        folder, latest = self.recorder.folder, time.monotonic() + _MOST_SECONDS_AT_END
        (folder / f"enough{self.recorder.rank}").touch()
        own = self.recorder.collectives
        while time.monotonic() < latest:
            journals = self._journals()
            if any(kinds[-1:] == ["collective"] and kinds.count("collective") > own for kinds in journals.values()):
                return True
            ended = {rank for rank in journals for name in ("enough", "done") if (folder / f"{name}{rank}").exists()}
            if all(rank in ended or "backward" not in kinds for rank, kinds in journals.items()):
                return False
            time.sleep(0.02)
        return False

    def forget(self) -> None:
        """Removes what this rank has recorded while it was alone."""
        recorder = self.recorder
        recorder.events[:] = [event for event in recorder.events if event["kind"] in _KEPT]
        recorder.tensors.clear()
        recorder.add("alone")
        recorder.step = recorder.backwards = self.steps = 0

    def _journals(self) -> dict[int, list[str]]:
        """Returns the kinds of the events that each other rank has written so far."""
        found: dict[int, list[str]] = {}
        for rank in {*range(self._others + 1)} - {self.recorder.rank}:
            path = self.recorder.folder / f"journal{rank}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            found[rank] = [json.loads(line)["kind"] for line in lines if line.endswith("}")]
        return found
