"""The examination: runs the stages, asks the checks, and writes the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ddp_doctor.accepted import accept_baseline, accept_comments, read_baseline
from ddp_doctor.errors import DoctorError, InputError, StoppedError
from ddp_doctor.evidence.comparisons import compare_evaluation, compare_training, comparison_of
from ddp_doctor.evidence.defect import defect_of_the_doctor
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.first_runs import FirstRuns
from ddp_doctor.evidence.requirements import several_ranks, unmet
from ddp_doctor.faults import choose_checks
from ddp_doctor.files.protection import Protection
from ddp_doctor.files.temporary import examination_folder
from ddp_doctor.findings import REASONS, CheckState, Finding, Report, Stage, State, Verdict, cannot_tell
from ddp_doctor.launch.commands import CommandRunner
from ddp_doctor.launch.runner import Runner, device_changes
from ddp_doctor.records.spec import Spec, Target, target_name
from ddp_doctor.versions import library_versions

_ORDER = list(Verdict)
_FIRST, _LAST = ("one process", "several ranks"), ("checks",)
# Those that compare numbers, of a program and of a module.
_NUMERIC = {
    False: ("one process in 64 bits",),
    True: ("one process in 64 bits", "evaluation"),
}
OnStage = Callable[[str, int, int], None]


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
    baseline: str = "",
    gpu_as_cpu: bool | None = None,
    on_stage: OnStage | None = None,
) -> Report:
    """Examines distributed training for silent faults; it runs the code several times, for a few steps.

    The code sees the files that it writes, but the user's files stay as they are.

    A LightningModule is named or given, and so is its data module:

        report = examine("lightning.pytorch.demos.boring_classes:BoringModel", devices=2, only=["LD009"])
        assert not report.faults, report.faults

    Args:
        target: A LightningModule class or a function, or its name as `package.module:name` or `path/to/file.py:name`.
        data: The same for a LightningDataModule; not needed if the module has its own loaders.
        devices: Number of ranks.
        steps: Optimizer steps per epoch; two epochs are run.
        samples: Most samples that are taken from a stream; a data set of up to 20 times as many is evaluated
            completely.
        only: Codes of the checks, or `structural` for those that need no equal numbers; by default all.
        skip: Codes of checks that are not made.
        timeout: Seconds after which a run counts as hung; multiplied by the load of each processor on a busy machine.
        args: Further arguments of a function.
        config: Path of a configuration of LightningCLI, instead of a target.
        command: Words of a command, instead of a target.
        baseline: Path of a file of `--write-baseline`, whose findings are accepted.
        gpu_as_cpu: Whether GPUs are emulated on the CPU; by default if the code needs a GPU and the machine has none.
        on_stage: Is called when a stage begins, with its name, its number and the number of stages there are at most.

    Returns:
        The report, with the findings, how each check ended, and the seconds that it took.

    Raises:
        InputError: An argument is wrong. A fault of the examined code is in the report.
    """
    begun = time.monotonic()
    what = Target(target_name(target), target_name(data), tuple(map(str, args)), config, tuple(command))
    if sum(map(bool, (what.name, what.config, what.command))) != 1:
        raise InputError("The doctor needs one target: a module or function, a configuration, or a command.")
    limits = {"devices": (devices, 2), "steps": (steps, 2), "samples": (samples, 1), "timeout": (timeout, 1)}
    for name, (value, least) in limits.items():
        if not value >= least:
            raise InputError(f"{name} must be at least {least}, but is {value}.")
    checks = choose_checks(only, skip)
    if baseline:
        read_baseline(baseline)
    spec = Spec(what, world_size=devices, steps=steps, samples=samples, timeout=timeout)
    spec = replace(spec, **device_changes(devices, gpu_as_cpu, torch.cuda.device_count()))  # type: ignore[arg-type]
    with examination_folder() as folder:
        spec = replace(spec, checkpoints=str(folder / "checkpoints"))
        protection = Protection(folder)
        runner = CommandRunner(folder, protection) if what.command else Runner(devices, folder, protection)
        try:
            examination = _Examination(Evidence(spec, runner), checks, folder, on_stage)
            examination.run()
            protection.end()
        finally:
            runner.close()
    report = examination.report(str(what), time.monotonic() - begun, protection)
    report = accept_comments(report)
    return accept_baseline(report, baseline) if baseline else report


class _Examination:
    """The stages of an examination."""

    def __init__(
        self, evidence: Evidence, checks: dict[str, ModuleType], folder: Path, on_stage: OnStage | None = None
    ) -> None:
        self.evidence, self.checks, self.folder, self.on_stage = evidence, checks, folder, on_stage
        self.numeric = any(not check.STRUCTURAL for check in checks.values())
        self.stages: list[Stage] = []
        self.findings: list[Finding] = []
        self.states: dict[str, CheckState] = {}
        self.error, self.hang = "", ""

    def run(self) -> None:
        """Runs the stages as far as the code allows, with emulated GPUs if it needs some."""
        self._begin(_first_stages(self.evidence)[0], self.evidence)
        self.evidence.runner.preload()
        first = FirstRuns(self.evidence, self._begin)
        worked = first.run()
        self.evidence, self.stages, self.error, self.hang = first.evidence, first.stages, first.error, first.hang
        if not worked:
            if self.error:
                self.error = defect_of_the_doctor(self.evidence) + self.error
            return
        if self.evidence.worked("ranks") and self.numeric:
            self._stage("one process in 64 bits", lambda: compare_training(self.evidence))
            if self.evidence.is_module:
                self._stage("evaluation", self._evaluation)
        self._stage("checks", self._check)
        if self.hang and not any(finding.verdict is Verdict.FAULT for finding in self.findings):
            self.hang = defect_of_the_doctor(self.evidence) + self.hang

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        begun = time.monotonic()
        self._begin(name, self.evidence)
        try:
            outcome = work()
        except DoctorError:
            raise
        except Exception as error:
            # A defect of a stage must not hide what the checks find without it.
            outcome = f"the stage failed, which is a defect of the doctor: {type(error).__name__}: {error}"
        if outcome:
            self.stages.append(Stage(name, outcome, time.monotonic() - begun))

    def _begin(self, name: str, evidence: Evidence) -> None:
        """Tells that a stage begins. Whether there are those of a module is known after the first run."""
        if self.on_stage:
            module = not evidence.spec.target.command and (evidence.single is None or evidence.is_module)
            names = [*_first_stages(evidence), *(_NUMERIC[module] if self.numeric else ()), *_LAST]
            self.on_stage(f"{name}, emulated GPUs" if evidence.spec.gpus else name, names.index(name) + 1, len(names))

    def _evaluation(self) -> str:
        outcome, self.hang = compare_evaluation(self.evidence)
        return outcome

    def _check(self) -> str:
        for code, check in self.checks.items():
            found = self._ask(check)
            relative = self.evidence.relative
            self.states[code] = CheckState.of(code, found)
            self.evidence.explained |= any(self._explains(check, finding) for finding in found)
            self.evidence.faulty |= any(finding.verdict is Verdict.FAULT for finding in found)
            self.findings += [
                replace(finding, code=code, place=relative(finding.place))
                for finding in found
                if finding.verdict not in REASONS
            ]
        made = sum(state.state is State.MADE for state in self.states.values())
        return f"{made} of {len(self.checks)} made"

    def _explains(self, check: ModuleType, finding: Finding) -> bool:
        """Returns whether a finding says why ranks train other weights, or why that is not known."""
        explains = getattr(check, "EXPLAINS", "")
        if finding.verdict in {Verdict.NOTE, Verdict.CANNOT_TELL}:
            return explains == "gradients" and self.evidence.reference.differs
        return finding.verdict not in REASONS and bool(explains)

    def _ask(self, check: ModuleType) -> Sequence[Finding]:
        """Returns what a check finds, or why it was not made."""
        try:
            found: list[Finding] = check.check(self.evidence)
            if all(finding.verdict is Verdict.NOT_REACHED for finding in found):
                # What was not reached before a rank failed may come later.
                missing = unmet(self.evidence, getattr(check, "NEEDS", ()))
                return [missing] if missing and (not found or several_ranks(self.evidence)) else found
            return found
        except StoppedError:
            raise
        except Exception as error:
            # A defect of a check must not hide what the others find.
            return [cannot_tell(f"The check failed: {type(error).__name__}: {error}")]

    def report(self, target: str, seconds: float, protection: Protection) -> Report:
        """Returns the report."""
        not_asked = "The examination ended before this check."
        return Report(
            target,
            self.evidence.spec.world_size,
            sorted(self.findings, key=lambda finding: (_ORDER.index(finding.verdict), finding.code)),
            self.stages,
            [self.states.get(code, CheckState(code, State.CANNOT_TELL, not_asked)) for code in self.checks],
            comparison_of(self.evidence) if self.numeric else None,
            error=self.error,
            hang=self.hang,
            seconds=seconds,
            versions=library_versions(),
            files=protection.files(self.evidence.runs.values()),
            emulated_gpus=self.evidence.spec.gpus,
        )


def _first_stages(evidence: Evidence) -> tuple[str, ...]:
    """Returns the first two stages: a command is first run on several ranks, as its user does."""
    return _FIRST[::-1] if evidence.spec.target.command else _FIRST
