"""Probe of the random draws of each step, from torch's generators and from those of NumPy and Python."""

from __future__ import annotations

from typing import Any

from ddp_doctor.probes.dropout import DropoutWatch
from ddp_doctor.probes.flows import DrawFlow
from ddp_doctor.probes.generators import States, values_drawn
from ddp_doctor.probes.random_replay import RandomReplay
from ddp_doctor.probes.rank_batches import RankBatches
from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import Spec


class DrawProbe:
    """Records or replaces the draws between a batch and the next one.

    Args:
        recorder: Takes the events.
        spec: The run.
        feed: The batches and draws of another run, or None.
    """

    def __init__(self, recorder: Recorder, spec: Spec, feed: RankBatches | None) -> None:
        self.recorder, self.spec, self.feed = recorder, spec, feed
        self.tape, self.dropout = RandomReplay(), DropoutWatch(recorder)
        self.tape.recording = spec.purpose in {"numbers", "whole", "resume"} and feed is None
        self.tape.reverse = bool(spec.interventions.get("reverse"))
        if spec.purpose == "train":
            self.tape.flow = DrawFlow()
        self._watched = False
        self._newest: dict[str, Any] | None = None
        self._hidden = States()

    def enter(self, batch: dict[str, Any], content: Any) -> None:
        """Begins the step after a training batch with this content."""
        self._newest = batch
        if self.tape.flow:
            self.tape.flow.begin(content)
        self.tape.count = self.tape.most = 0
        if self.feed:
            self.tape.replay(self.feed.draws(batch["loader"], batch["iteration"], batch["number"]))
        self._hidden = States()
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def watch_dropout(self) -> None:
        """Sees active dropout until the next batch."""
        self._watched = True
        self.dropout.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Ends the step after the newest batch, and keeps its draws."""
        if self._watched:
            self._watched = False
            self.dropout.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch, self._newest = self._newest, None
        if batch is None:
            return
        self.tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch["draws"], batch["drawn"] = self.tape.count, self.tape.most
        values = values_drawn(self._hidden, States())
        batch["hidden"] = {name: number for name, number in values.items() if number}
        batch["flows"] = self.tape.flow.found() if self.tape.flow else []
        self.recorder.add("drew", hidden=" and ".join(batch["hidden"]), batch=batch["number"])
        draws, self.tape.draws = self.tape.draws, []
        if self.spec.purpose != "numbers":
            batch["draw_digest"] = digest([draw.outputs for draw in draws])
            return
        for number, draw in enumerate(draws):
            for place, output in enumerate(draw.outputs):
                name = f"draw/{batch['loader']}/{batch['iteration']}/{batch['number']}/{number}/{place}/{draw.name}"
                self.recorder.tensors[name] = output
