"""What the checks read: the records of all runs, and the comparison of several ranks with one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_doctor.evidence.micro_batches import compare_micro_batches
from ddp_doctor.evidence.rank_comparison import THRESHOLD, RankComparison, compare_ranks
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec

if TYPE_CHECKING:
    from ddp_doctor.launch.runner import Runner

# If the code does not support 64 bits; healthy programs are below 1e-4.
_THRESHOLD_OF_32_BITS = 1e-3


@dataclass
class Evidence:
    """The runs of an examination.

    Attributes:
        spec: The specification that all runs are derived from.
        runner: Runs further ones.
        runs: The runs by name: `single` (one process, as the user has it), `ranks` (several ranks, two short epochs
            with their evaluation), `again` (`ranks` repeated, if something differs), `numbers` (the first steps in 64
            bits), `reference` (one process that was fed from it, and ends with its last step), `interrupted` and
            `started again` (a program that is ended after its first checkpoint, and its restart). `numbers later` are
            the longer epochs that follow `numbers`, of which weights and branches are recorded. Those that were not
            possible are missing. `compare` and `later` name others, and a check those that it alone needs.
        reference: The comparison of `numbers` and `reference`.
        deterministic: Whether the same code gives the same weights, as far as it is known.
        double: Whether the numbers are those of 64 bits.
        explained: Whether a check has found a fault, or cannot tell whether there is one in the gradients.
        faulty: Whether a check has found a fault.
    """

    spec: Spec
    runner: Runner
    runs: dict[str, Run] = field(default_factory=dict)
    reference: RankComparison = field(default_factory=lambda: RankComparison(cannot="it was not reached"))
    deterministic: bool = True
    double: bool = True
    explained: bool = False
    faulty: bool = False

    def run(self, name: str, **changes: Any) -> Run:
        """Runs the specification with changes, once, under a name."""
        if name not in self.runs:
            self.runs[name] = run = self.runner.run(replace(self.spec, **changes))
            if run.later:
                self.runs[f"{name} later"] = run.later
        return self.runs[name]

    def again(self) -> Run:
        """Returns a repetition of the run `ranks`, in which branches are recorded."""
        return self.run("again", interventions={"branches": True})

    def later(self) -> Run:
        """Returns a run of several ranks with longer epochs, of which weights and branches are recorded.

        It ends after 15 seconds of training.
        """
        if "numbers later" not in self.runs:
            self.run("more steps", purpose="numbers", later=True)
        return self.runs.get("numbers later") or self.runs["more steps later"]

    def worked(self, name: str) -> Run | None:
        """Returns a run that worked on all ranks, otherwise None."""
        found = self.runs.get(name)
        return found if found and found.worked else None

    def failed(self, *names: str) -> Run | None:
        """Returns the first of these runs that was made and did not work, otherwise None."""
        return next((run for name in names if (run := self.runs.get(name)) and not run.worked), None)

    @property
    def ranks(self) -> Sequence[RankRecord]:
        """The ranks of the run `ranks`, as far as they came."""
        return self.runs["ranks"].ranks if "ranks" in self.runs else []

    @property
    def trained(self) -> Sequence[RankRecord]:
        """The ranks of the run `ranks` if it worked, otherwise none."""
        return self.ranks if self.worked("ranks") else []

    @property
    def single(self) -> RankRecord | None:
        """The process of the run `single`, if it worked, and trains what the ranks train together."""
        run = self.worked("single")
        return run.ranks[0] if run and not self._trains_alone else None

    @property
    def _trains_alone(self) -> bool:
        """Whether one rank trains something alone before, as one process does, too."""
        return any(rank.of_kind("alone") for rank in self.ranks)

    def compare(self, *, sync_batch_norm: bool = False) -> RankComparison:
        """Runs the first steps on several ranks, and compares them with one process in the best way that is possible.

        Args:
            sync_batch_norm: Whether batch norm is synchronized in the run of several ranks.
        """
        if self._trains_alone:
            return RankComparison(cannot="one rank trains something alone before the ranks train together")
        prefix = "synchronized " if sync_batch_norm else ""
        changes: dict[str, Any] = {"sync_batch_norm": True} if sync_batch_norm else {}
        wanted = {"purpose": "numbers", "interventions": changes, "later": not sync_batch_norm}
        ranks = self.run(f"{prefix}numbers", double=self.double, **wanted)
        if not ranks.worked and self.double and not sync_batch_norm:
            # The code does not support 64 bits.
            self.double = False
            del self.runs["numbers"]
            ranks = self.run("numbers", **wanted)
        if not ranks.worked:
            return RankComparison(cannot=f"the run with several ranks failed ({ranks.short_reason})")
        one: dict[str, Any] = {"purpose": "numbers", "double": self.double, "world_size": 1, "feed": str(ranks.folder)}
        threshold = THRESHOLD if self.double else _THRESHOLD_OF_32_BITS
        changes = {"ranks": self.spec.world_size}
        why = _why_not_joined(ranks)
        if not why:
            reference = self.run(f"{prefix}reference", **one, interventions=changes)
            found = compare_ranks(ranks, reference, threshold=threshold)
            if not found.cannot:
                return found
            why = found.cannot
        # More steps, as one process may step after the micro-batches of each rank.
        one["steps"] = self.spec.steps * self.spec.world_size
        changes["micro_batches"] = True
        in_turn = self.run(f"{prefix}reference in turn", **one, interventions=changes)
        found = compare_micro_batches(ranks, in_turn, threshold=threshold)
        if found.cannot:
            return RankComparison(cannot=f"{why}; {found.cannot}")
        return replace(found, limits=f"{found.limits}, because {why}")

    def relative(self, place: str) -> str:
        """Returns a place with a path relative to the current folder."""
        return place.removeprefix(f"{Path.cwd()}{os.sep}")


def _why_not_joined(ranks: Run) -> str:
    """Returns why one process cannot be given the batches of the ranks at once, as far as the ranks show it."""
    if not all(any(event["trains"] for event in record.of_kind("batch")) for record in ranks.ranks):
        return "the samples come from no DataLoader of torch"
    for hidden in (event["hidden"] for record in ranks.ranks for event in record.of_kind("drew") if event["hidden"]):
        return f"the training step draws random numbers of {hidden}, which cannot be given to one process"
    return ""
