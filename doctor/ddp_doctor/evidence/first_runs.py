"""The first runs of an examination: on one process and on several ranks, with emulated GPUs if the code needs one."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddp_doctor.emulation.demand import emulation_for, tried_gpu
from ddp_doctor.errors import InputError
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Stage

_NO_TRAINING = (
    "ended with exit code 0, and no process that can be observed has trained: an argument such as --help ends a "
    "program early, and processes that are started by ssh, Docker or Ray are not observed."
)


def _reasons(evidence: Evidence) -> list[str]:
    """Returns why the runs failed."""
    return [run.short_reason for run in evidence.runs.values() if run.errors or run.hung or run.lost]


class FirstRuns:
    """Runs the code as its user does.

    Args:
        evidence: Takes the runs.
        begin: Is called when a stage begins, with its name and the evidence.

    Attributes:
        evidence: The evidence of the runs that count.
        stages: The stages.
        error: Why the code could not be examined; empty if it could.
        hang: The stacks of the ranks if one hung or was lost; empty otherwise.
    """

    def __init__(self, evidence: Evidence, begin: Callable[[str, Evidence], None]) -> None:
        self.evidence, self._begin = evidence, begin
        self.stages: list[Stage] = []
        self.error, self.hang = "", ""

    def run(self) -> bool:
        """Makes the runs; returns whether the code could be run.

        Raises:
            InputError: The code is not what can be examined.
        """
        worked, rejected = self._try()
        first, before = self.evidence, (worked, rejected, self.stages, self.error, self.hang)
        while changes := emulation_for(self.evidence.spec, self.evidence.runs.values()):
            seconds = sum(stage.seconds for stage in self.stages)
            self.stages = [Stage("without a GPU", "the code needs one, so GPUs were emulated", seconds)]
            self.evidence, self.error, self.hang = self.evidence.with_spec(**changes), "", ""
            worked, rejected = self._try()
        failed = self.evidence is not first and not self.evidence.worked("ranks")
        same = not tried_gpu(first.runs.values()) and _reasons(first) == _reasons(self.evidence)
        if failed and (first.worked("ranks") or same):
            # The emulation did not help: what was seen without it counts.
            self.evidence, (worked, rejected, self.stages, self.error, self.hang) = first, before
        if rejected is None and self._fails_if_shortened():
            worked = self._with_whole_epochs() or worked
        if rejected is not None:
            raise rejected
        return worked

    def _fails_if_shortened(self) -> bool:
        """Returns whether the code failed after one of its epochs was shortened, which it may not expect."""
        failed = self.evidence.failed("ranks", "single")
        return failed is not None and bool(failed.errors) and any(rank.end["shortened"] for rank in failed.ranks)

    def _with_whole_epochs(self) -> bool:
        """Runs the code with whole epochs; if that fails, what was seen before counts. Returns whether it worked."""
        before = (self.evidence, self.stages, self.error, self.hang)
        told = "the code fails if its epochs are shortened, so whole epochs were run"
        self.stages = [Stage("short epochs", told, sum(stage.seconds for stage in self.stages))]
        self.evidence, self.error, self.hang = self.evidence.with_spec(whole_epochs=True), "", ""
        worked, rejected = self._try()
        if worked and rejected is None and not self.evidence.failed("ranks", "single"):
            return True
        self.evidence, self.stages, self.error, self.hang = before
        return False

    def _try(self) -> tuple[bool, InputError | None]:
        """Runs the code on one process and on several; returns whether that was possible, or why it is rejected."""
        try:
            if self.evidence.spec.target.command:
                # While the user's command starts, torch is imported for the forks that all other runs are.
                self._stage("several ranks", self._several)
                self.evidence.runner.use_forks()
                self._stage("one process", self._single)
            else:
                self._stage("one process", self._single)
                if not self._stops_early():
                    self._stage("several ranks", self._several)
            if self._stops_early():
                return False, None
        except InputError as error:
            return False, error
        single = self.evidence.runs["single"]
        if not single.worked and not self.evidence.worked("ranks"):
            for run in (single, self.evidence.runs["ranks"]):
                if run.ended_early:
                    return False, InputError(f"{self.evidence.spec.target} {_NO_TRAINING}")
            if single.needs_launcher:
                return False, InputError(
                    f"{self.evidence.spec.target} expects the variables of a launcher, such as RANK: start it with "
                    f"torchrun --nproc-per-node {self.evidence.spec.world_size}."
                )
            # Code that is made for several ranks fails on one process for another reason.
            several = self.evidence.runs["ranks"]
            self.error, self.hang = single.reason if several.hung else several.reason, ""
            return False, None
        return True, None

    def _stops_early(self) -> bool:
        """Returns whether one process hung, or needs GPUs to be emulated."""
        single = self.evidence.runs["single"]
        return single.hung or bool(emulation_for(self.evidence.spec, [single]))

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        begun = time.monotonic()
        self._begin(name, self.evidence)
        self.stages.append(Stage(name, work(), time.monotonic() - begun))

    def _single(self) -> str:
        run = self.evidence.run("single", world_size=1)
        if run.hung:
            # Without a record of any rank there are no stacks, but it hung.
            self.hang = run.stacks or f"No rank has written a record.\n{run.ranks[0].output[-2000:]}"
            return "it hung"
        if run.errors and run.errors[0]["input"]:
            raise InputError(run.errors[0]["message"])
        if run.errors or run.lost:
            # Code that is made for several ranks may run on these.
            return f"it fails on one process ({run.short_reason}), so several ranks cannot be compared with it"
        self.evidence.runner.preload(run.ranks[0].end["libraries"])
        steps = run.ranks[0].of_kind("step")
        if not steps and not run.ranks[0].of_kind("epoch"):
            raise InputError(
                f"{self.evidence.spec.target} ended without training: it took no batch of a DataLoader and no step."
            )
        return f"{steps[-1]['step'] + 1 if steps else 0} optimizer steps"

    def _several(self) -> str:
        run = self.evidence.run("ranks")
        alone = [rank for rank in run.ranks if rank.events]
        # A launcher may start fewer processes than it is told, and the doctor waits for the others.
        ended = bool(alone) and (not run.hung or bool(alone[0].of_kind("step")))
        if len(alone) == 1 and ended and not run.errors and not alone[0].of_kind("init_process_group"):
            raise InputError(
                f"{self.evidence.spec.target} trained on one process and joined no process group, so there are no "
                "ranks to compare: start it on several, for example with torchrun."
            )
        if not run.worked:
            self.hang = run.stacks or "No rank has written a record."
            return "a rank hung" if run.hung else f"it fails on several ranks: {run.short_reason}"
        self.evidence.runner.preload(run.ranks[0].end["libraries"])
        counts = [len(rank.of_kind("step")) for rank in run.ranks]
        taken = counts if len(set(counts)) > 1 else counts[0]
        return f"{taken} optimizer steps on each of {len(counts)} ranks"
