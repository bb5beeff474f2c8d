"""The examination: runs the stages, asks the checks, and writes the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_doctor.checks import choose_checks
from ddp_doctor.errors import InputError
from ddp_doctor.evidence.communication import not_comparable
from ddp_doctor.evidence.comparisons import compare_evaluation, compare_training
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.files.protection import Protection
from ddp_doctor.files.temporary import examination_folder
from ddp_doctor.findings import Finding, Report, Stage, Verdict, cannot_tell
from ddp_doctor.launch.commands import CommandRunner
from ddp_doctor.launch.runner import Runner
from ddp_doctor.records.spec import Spec, Target, target_name

_LIBRARIES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "torchvision", "transformers", "accelerate")
_ORDER = list(Verdict)


def examine(
    target: Any = "",
    data: Any = None,
    *,
    devices: int = 2,
    steps: int = 3,
    samples: int = 512,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    timeout: float = 60.0,
    args: Sequence[str] = (),
    config: str = "",
    command: Sequence[str] = (),
    keep_output: bool = False,
) -> Report:
    """Examines distributed training for silent faults; it runs the code several times, for a few steps.

    The code sees the files that it writes, but the user's files stay as they are.

    Args:
        target: A LightningModule class or a function, or its name as `package.module:name` or `path/to/file.py:name`.
        data: The same for a LightningDataModule; not needed if the module has its own loaders.
        devices: Number of ranks.
        steps: Optimizer steps per epoch; two epochs are run.
        samples: Most samples that are taken from a stream; a data set of up to 20 times as many is evaluated
            completely.
        only: Codes of the checks, or `structural` for those that need no equal numbers; by default all.
        skip: Codes of checks that are not made.
        timeout: Seconds after which a run counts as hung.
        args: Further arguments of a function.
        config: Path of a configuration of LightningCLI, instead of a target.
        command: Words of a command, instead of a target.
        keep_output: Whether the files that the code writes are kept, in a new folder `doctor-output`.

    Raises:
        InputError: An argument is wrong. A fault of the examined code is in the report.
    """
    begun = time.monotonic()
    what = Target(target_name(target), target_name(data), tuple(map(str, args)), config, tuple(command))
    if sum(map(bool, (what.name, what.config, what.command))) != 1:
        raise InputError("The doctor needs one target: a module or function, a configuration, or a command.")
    limits = ("devices", devices, 2), ("steps", steps, 2), ("samples", samples, 1), ("timeout", timeout, 1)
    for name, value, least in limits:
        if not value >= least:
            raise InputError(f"{name} must be at least {least}, but is {value}.")
    checks = choose_checks(only, skip)
    spec = Spec(what, world_size=devices, steps=steps, samples=samples, timeout=timeout)
    with examination_folder() as folder:
        protection = Protection(folder, keep_output=keep_output)
        runner = CommandRunner(folder, protection) if what.command else Runner(devices, folder, protection)
        try:
            runner.preload()
            examination = _Examination(Evidence(spec, runner), checks, folder)
            examination.run()
            protection.end()
        finally:
            runner.close()
    return examination.report(str(what), time.monotonic() - begun, protection)


class _Examination:
    """The stages of an examination."""

    def __init__(self, evidence: Evidence, checks: dict[str, ModuleType], folder: Path) -> None:
        self.evidence, self.checks, self.folder = evidence, checks, folder
        self.numeric = any(not check.STRUCTURAL for check in checks.values())
        self.stages: list[Stage] = []
        self.findings: list[Finding] = []
        self.error, self.hang = "", ""

    def run(self) -> None:
        """Runs the stages as far as the code allows."""
        self._stage("one process", self._single)
        if self.hang:
            return
        self._stage("several ranks", self._several)
        single = self.evidence.runs.get("single")
        if single and not single.worked and not self.evidence.worked("ranks"):
            self.error, self.hang = single.reason, ""
            return
        if self.evidence.worked("ranks") and self.numeric:
            self._stage("determinism", self._determinism)
            self._stage("one process in 64 bits", lambda: compare_training(self.evidence))
            if self.evidence.is_module:
                self._stage("evaluation", self._evaluation)
                self._stage("resume", self._resume)
        self._stage("checks", self._check)

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        begun = time.monotonic()
        outcome = work()
        if outcome:
            self.stages.append(Stage(name, outcome, time.monotonic() - begun))

    def _single(self) -> str:
        if why := self.evidence.runner.why_not_alone(self.evidence.spec):
            return f"not run, so several ranks cannot be compared with it: {why}"
        run = self.evidence.run("single", world_size=1)
        if run.hung:
            self.hang = run.stacks
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
                f"{self.evidence.spec.target} came to its end without training: it used no DataLoader and no optimizer."
            )
        return f"{steps[-1]['step'] + 1 if steps else 0} optimizer steps"

    def _several(self) -> str:
        run = self.evidence.run("ranks")
        if not run.worked:
            self.hang = run.stacks
            hung = run.hung or run.lost
            return "a rank hung or was lost" if hung else f"it fails on several ranks: {run.errors[0]['type']}"
        self.evidence.runner.preload(run.ranks[0].end["libraries"])
        counts = [len(rank.of_kind("step")) for rank in run.ranks]
        taken = counts if len(set(counts)) > 1 else counts[0]
        return f"{taken} optimizer steps on each of {len(counts)} ranks"

    def _determinism(self) -> str:
        again = self.evidence.run("again")
        if not again.worked:
            self.evidence.deterministic = False
            return f"the second run failed: {again.short_reason}"
        first, second = (
            [[event["weights"] for event in rank.of_kind("stepped")] for rank in run.ranks]
            for run in (self.evidence.runs["ranks"], again)
        )
        self.evidence.deterministic = same = first == second
        return "two runs gave bit-identical weights" if same else "two runs gave different weights"

    def _evaluation(self) -> str:
        outcome, self.hang = compare_evaluation(self.evidence)
        return outcome

    def _resume(self) -> str:
        evidence = self.evidence
        where = {"DDP_DOCTOR_CHECKPOINT": str(self.folder / "checkpoint.ckpt")}
        for purpose in ("whole", "save", "resume"):
            if not evidence.run(purpose, where, purpose=purpose, world_size=1).worked:
                return f"the run {purpose!r} failed: {evidence.runs[purpose].short_reason}"
        return "trained two epochs at once, and one epoch before and one after a checkpoint"

    def _check(self) -> str:
        reasons = not_comparable(self.evidence)
        for code, check in self.checks.items():
            try:
                found = check.check(self.evidence)
            except Exception as error:
                # A defect of a check must not hide what the others find.
                found = [cannot_tell(f"The check failed: {type(error).__name__}: {error}")]
            if code in reasons and not found:
                found = [cannot_tell(reasons[code])]
            relative = self.evidence.relative
            self.findings += [replace(finding, code=code, place=relative(finding.place)) for finding in found]
        return f"{len(self.checks)} checks"

    def report(self, target: str, seconds: float, protection: Protection) -> Report:
        """Returns the report."""
        findings = sorted(self.findings, key=lambda finding: (_ORDER.index(finding.verdict), finding.code))
        return Report(
            target,
            self.evidence.spec.world_size,
            findings,
            self.stages,
            tuple(self.checks),
            self.error,
            self.hang,
            seconds,
            _versions(),
            protection.files(self.evidence.runs.values()),
        )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
