"""The examination: runs the stages, asks the checks, and writes the report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_doctor.accepted import accept_baseline, accept_comments, read_baseline
from ddp_doctor.errors import DoctorError, InputError, StoppedError
from ddp_doctor.evidence.comparisons import compare_training, comparison_of
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import ask
from ddp_doctor.faults import choose_checks, is_structural, load_checks
from ddp_doctor.files.protection import Protection, examination_folder
from ddp_doctor.findings import DEFECT, MADE, REASONS, CheckState, Finding, Report, Stage, Verdict, cannot_tell
from ddp_doctor.launch.runner import Runner, device_changes, emulation_for
from ddp_doctor.lazy import torch
from ddp_doctor.records.spec import Spec, Target, target_name
from ddp_doctor.source.reading import read
from ddp_doctor.versions import library_versions

_ORDER = list(Verdict)
# Of NVIDIA and AMD, and of both under Windows.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# They report what no other check explains: those that could explain it are asked, whether they are wanted or not.
_WHAT_IS_LEFT = ("LD015", "LD016", "LD036")
OnStage = Callable[[str], None]
_NO_TRAINING = (
    "ended with exit code 0, and no process that can be observed has trained: an argument such as --help ends a "
    "program early, and processes that are started by ssh, Docker or Ray are not observed."
)
_DEFECT = f"{DEFECT}: this is a defect of the doctor, not a fault of the program. Please report it with these lines:\n"


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
    command: Sequence[str] = (),
    baseline: str = "",
    gpu_as_cpu: bool | None = None,
    on_stage: OnStage = lambda _: None,
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
        command: Words of a command, instead of a target.
        baseline: Path of a file of `--write-baseline`, whose findings are accepted.
        gpu_as_cpu: Whether GPUs are emulated on the CPU; by default if the code needs a GPU and the machine has none.
        on_stage: Is called with the name of each stage when it begins.

    Returns:
        The report, with the findings, how each check ended, and the seconds that it took.

    Raises:
        InputError: An argument is wrong. A fault of the examined code is in the report.
    """
    begun = time.monotonic()
    what = Target(target_name(target), target_name(data), tuple(map(str, args)), tuple(command))
    if bool(what.name) == bool(what.command):
        raise InputError("The doctor needs one target: a module or function, or a command.")
    limits = {"devices": (devices, 2), "steps": (steps, 2), "samples": (samples, 1), "timeout": (timeout, 1)}
    for name, (value, least) in limits.items():
        if not value >= least:
            raise InputError(f"{name} must be at least {least}, but is {value}.")
    checks = choose_checks(only, skip)
    if baseline:
        read_baseline(baseline)
    likely = _likely(what)
    spec = Spec(what, world_size=devices, steps=steps, samples=samples, timeout=timeout)
    # Without a driver, the first run need not wait for an import of torch.
    gpus = torch.cuda.device_count() if any(map(os.path.exists, _DRIVERS)) else 0
    spec = replace(spec, **device_changes(devices, gpu_as_cpu, gpus))  # type: ignore[arg-type]
    with examination_folder() as folder:
        protection = Protection(folder)
        runner = Runner(what, devices, folder, protection)
        try:
            examination = _Examination(Evidence(spec, runner), checks, on_stage).first_runs()
            examination.finish()
            protection.end()
        finally:
            runner.close()
    report = examination.report(str(what), time.monotonic() - begun, protection)
    if likely:
        found = {finding.code for finding in report.findings}
        told = [
            f"{one.code} at {one.place} ({'' if one.code in found else 'not '}confirmed)"
            for one in likely.findings
            if one.code in checks
        ]
        outcome = f"{likely.stages[0].outcome}; likely {', '.join(told) or 'nothing'}"
        report = replace(report, stages=[*report.stages, replace(likely.stages[0], outcome=outcome)])
    report = accept_comments(report)
    return accept_baseline(report, baseline) if baseline else report


def _likely(target: Target) -> Report | None:
    """Returns what reading says of the script that a target names; None if it names none that can be read."""
    words = [*target.command, target.name.rpartition(":")[0]]
    script = next((word for word in words if word.endswith(".py") and Path(word).is_file()), "")
    try:
        return read([script]) if script else None
    except InputError:
        return None


class _Examination:
    """One attempt to examine the code: its runs, its stages, and what the checks find.

    Attributes:
        evidence: The runs.
        error: Why the code could not be examined; empty if it could.
        hang: The stacks of the ranks if one hung or was lost; empty otherwise.
        rejected: Why the code is not what can be examined, or None.
    """

    def __init__(self, evidence: Evidence, checks: dict[str, ModuleType], on_stage: OnStage = lambda _: None) -> None:
        self.evidence, self.checks, self.on_stage = evidence, checks, on_stage
        self.numeric = any(not is_structural(check) for check in checks.values())
        self.stages: list[Stage] = []
        self.findings: list[Finding] = []
        self.states: dict[str, CheckState] = {}
        self.error, self.hang = "", ""
        self.rejected: InputError | None = None

    def first_runs(self) -> _Examination:
        """Runs the code as its user does, and again with what it needs; returns the attempt that counts.

        Raises:
            InputError: The code is not what can be examined.
        """
        self._try()
        found, runs = self, self.evidence.runs
        if changes := emulation_for(self.evidence.spec, runs.values()):
            found = self._again("without a GPU", "the code needs one, so GPUs were emulated", changes)
            same = _reasons(self.evidence) == _reasons(found.evidence)
            if not found.evidence.worked("ranks") and (self.evidence.worked("ranks") or same):
                # The emulation did not help: what was seen without it counts.
                found = self
        failed = None if found.rejected else found.evidence.failed("ranks", "single")
        if failed and failed.errors and any(rank.end["shortened"] for rank in failed.ranks):
            told = "the code fails if its epochs are shortened, so whole epochs were run"
            whole = found._again("short epochs", told, {"whole_epochs": True})
            found = found if whole.failed or whole.evidence.failed("ranks", "single") else whole
        last = found.evidence.runs.values()
        if not found.rejected and any(run.ended_early for run in last) and not any(run.worked for run in last):
            found.rejected = InputError(f"{self.evidence.spec.target} {_NO_TRAINING}")
        if found.rejected:
            raise found.rejected
        return found

    @property
    def failed(self) -> bool:
        """Whether the first runs leave nothing to compare."""
        hung = self.evidence.runs["single"].hung and not self.evidence.worked("ranks")
        return bool(self.rejected or self.error or hung)

    def _again(self, name: str, outcome: str, changes: dict[str, Any]) -> _Examination:
        """Returns another attempt, with a changed specification."""
        evidence = Evidence(replace(self.evidence.spec, **changes), self.evidence.runner)
        other = _Examination(evidence, self.checks, self.on_stage)
        other.stages.append(Stage(name, outcome, sum(stage.seconds for stage in self.stages)))
        other._try()
        return other

    def _try(self) -> None:
        """Runs the code on one process and on several ranks; a command is first run on several, as its user does."""
        evidence = self.evidence
        try:
            if evidence.spec.target.command:
                # While the user's command starts, torch is imported for the forks that all other runs are.
                self._stage("several ranks", self._several)
                evidence.runner.forks = True
            self._stage("one process", self._single)
            single = evidence.runs["single"]
            if single.hung or emulation_for(evidence.spec, [single]):
                return
            if not evidence.spec.target.command:
                self._stage("several ranks", self._several)
        except InputError as error:
            self.rejected = error
            return
        several = evidence.runs["ranks"]
        if not (single.worked or several.worked):
            # Code that is made for several ranks fails on one process for another reason.
            self.error, self.hang = single.reason if several.hung else several.reason, ""

    def _single(self) -> str:
        run = self.evidence.run("single", world_size=1)
        if run.hung and not self.evidence.worked("ranks"):
            # Without a record of any rank there are no stacks, but it hung.
            self.hang = run.stacks or f"No rank has written a record.\n{run.ranks[0].output[-2000:]}"
            return "it hung"
        if run.errors and run.errors[0]["input"]:
            raise InputError(run.errors[0]["message"])
        if not run.worked:
            # Code that is made for several ranks may run on these.
            return f"it fails on one process ({run.short_reason}), so several ranks cannot be compared with it"
        self.evidence.runner.preload(*run.ranks[0].end["imported"])
        steps = run.ranks[0].of_kind("step")
        if not steps and not run.ranks[0].of_kind("epoch"):
            why = "no DataLoader gave a batch, and no optimizer of torch stepped"
            raise InputError(f"{self.evidence.spec.target} ended without training: {why}.")
        return f"{steps[-1]['step'] + 1 if steps else 0} optimizer steps"

    def _several(self) -> str:
        run = self.evidence.run("ranks")
        recorded = [rank for rank in run.ranks if rank.events]
        # A launcher may start fewer processes than it is told, and the doctor waits for the others.
        ended = bool(recorded) and (not run.hung or bool(recorded[0].of_kind("step")))
        if len(recorded) == 1 and ended and not run.errors and not recorded[0].of_kind("init_process_group"):
            raise InputError(
                f"{self.evidence.spec.target} trained on one process and joined no process group, so there are no "
                "ranks to compare: start it on several, for example with torchrun."
            )
        if not run.worked:
            self.hang = run.stacks or "No rank has written a record."
            return "a rank hung" if run.hung else f"it fails on several ranks: {run.short_reason}"
        self.evidence.runner.preload(*run.ranks[0].end["imported"])
        counts = [len(rank.of_kind("step")) for rank in run.ranks]
        taken = counts if len(set(counts)) > 1 else counts[0]
        return f"{taken} optimizer steps on each of {len(counts)} ranks"

    def finish(self) -> None:
        """Compares the runs, and asks the checks."""
        if self.failed:
            self.error = self.error and self._defect() + self.error
            return
        if self.evidence.worked("ranks") and self.numeric:
            self._stage("one process in 64 bits", self._compare)
        self._stage("checks", self._check)
        if self.hang and not any(finding.verdict is Verdict.FAULT for finding in self.findings):
            self.hang = self._defect() + self.hang

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        begun = time.monotonic()
        self.on_stage(f"{name}, emulated GPUs" if self.evidence.spec.gpus else name)
        self.stages.append(Stage(name, work(), time.monotonic() - begun))

    def _compare(self) -> str:
        try:
            return compare_training(self.evidence)
        except DoctorError:
            raise
        except Exception as error:
            # A defect of the comparison must not hide what the checks find without it.
            return f"the stage failed, which is a defect of the doctor: {type(error).__name__}: {error}"

    def _check(self) -> str:
        checks = load_checks()
        # The last resort is asked after newer codes as well.
        order = sorted(checks, key=lambda code: (code == _WHAT_IS_LEFT[-1], code))
        last = max((order.index(code) for code in _WHAT_IS_LEFT if code in self.checks), default=0)
        for number, code in enumerate(order):
            check = checks[code]
            explains = number < last and hasattr(check, "EXPLAINS") and (self.numeric or is_structural(check))
            if code not in self.checks and not explains:
                continue
            found = self._ask(check)
            self.evidence.explained |= any(self._explains(check, finding) for finding in found)
            self.evidence.faulty |= any(finding.verdict is Verdict.FAULT for finding in found)
            if code not in self.checks:
                continue
            self.states[code] = CheckState.of(code, found)
            self.findings += [
                replace(finding, code=code, place=self.evidence.relative(finding.place))
                for finding in found
                if finding.verdict not in REASONS
            ]
        made = sum(state.state == MADE for state in self.states.values())
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
            return ask(check, self.evidence)
        except StoppedError:
            raise
        except Exception as error:
            # A defect of a check must not hide what the others find.
            return [cannot_tell(f"The check failed: {type(error).__name__}: {error}")]

    def _defect(self) -> str:
        """Returns that the defect is the doctor's if the code runs alone where it failed under it; or nothing."""
        failed = self.evidence.failed("ranks", "single")
        if failed is None or failed.hung or self.evidence.spec.gpus:
            # What hangs alone would hang here, and a program for GPUs needs the doctor to run at all.
            return ""
        run = self.evidence.run("without the doctor", purpose="bare", world_size=failed.spec.world_size)
        # Under the doctor, a rank waits for a shorter time: what waits for ever also hangs alone.
        waited = any("timed out" in error["message"].lower() for error in failed.errors)
        runs = (run.hung and not waited) or (bool(run.ranks) and all(rank.code == 0 for rank in run.ranks))
        return _DEFECT if runs else ""

    def report(self, target: str, seconds: float, protection: Protection) -> Report:
        """Returns the report."""
        not_asked = "The examination ended before this check."
        return Report(
            target,
            self.evidence.spec.world_size,
            sorted(self.findings, key=lambda finding: (_ORDER.index(finding.verdict), finding.code)),
            self.stages,
            [self.states.get(code, CheckState(code, Verdict.CANNOT_TELL, not_asked)) for code in self.checks],
            comparison_of(self.evidence) if self.numeric else None,
            error=self.error,
            hang=self.hang,
            seconds=seconds,
            versions=library_versions(),
            files=protection.files(self.evidence.runs.values()),
            emulated_gpus=self.evidence.spec.gpus,
        )


def _reasons(evidence: Evidence) -> list[str]:
    """Returns why the runs failed."""
    return [run.short_reason for run in evidence.runs.values() if run.errors or run.hung or run.lost]
