"""Runs the planted programs with two other tools, and prints what they report: the rows of docs/proof.md.

python tests/other_tools.py guardtower        all programs that are functions or LightningModules
python tests/other_tools.py torch_audit gan   those whose names contain a word

The tool must be installed (`pip install guardtower torch-audit`). A user adds its lines by hand; here they are added
where the tools' documentation wants them: at the first loss of a program, with its model and its optimizer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from lightning.pytorch import Trainer
from projects.cases import CASES, Case
from projects.families import FAMILIES

from ddp_doctor.launch.rank import load_object, takes_rank

RANKS, SECONDS = 2, 60
# Findings below this are information in both tools.
# The code of the doctor's check that describes what a rule of a tool says.
NAMES = {"DDP-001": "LD029", "DDP-002": "LD012", "DDP-003": "LD009", "OPT-001": "LD019", "TA304": "LD012"}
AUDITORS: list[Any] = []
LEVELS = {"WARN", "WARNING", "ERROR", "FATAL", "CRITICAL", "FAIL"}


def attach(report: Callable[[str, str, str], None], tool: str) -> None:
    """Calls a tool at the first loss of this process, with the model that was called last and the latest optimizer."""
    models: list[torch.nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    init, backward = torch.optim.Optimizer.__init__, torch.Tensor.backward
    done: list[bool] = []

    def on_init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        optimizers.append(optimizer)

    def on_call(module: torch.nn.Module, *_: Any) -> None:
        if not done and torch.is_grad_enabled() and not any(module in set(model.modules()) for model in models[-1:]):
            models.append(module)

    def on_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        first = not done and bool(models)
        if first:
            done.append(True)
        if first and tool == "guardtower":
            _guardtower(models[-1], loss, optimizers, report)
            return
        if first:
            _torch_audit(models[-1], optimizers, report)
        backward(loss, *args, **kwargs)

    torch.optim.Optimizer.__init__ = on_init  # type: ignore[method-assign]
    torch.Tensor.backward = on_backward  # type: ignore[method-assign]
    torch.nn.modules.module.register_module_forward_pre_hook(on_call)


def _guardtower(model: Any, loss: torch.Tensor, optimizers: list[Any], report: Callable[[str, str, str], None]) -> None:
    import guardtower

    # Lightning sets the mode of its module, not that of the wrapper.
    model.training = next(iter(model.children()), model).training
    found = guardtower.audit(model, lambda: loss, optimizer=optimizers[-1] if optimizers else None)
    for finding in found.findings:
        report(finding.catalog_id or finding.check, finding.severity.name, finding.message)


def _torch_audit(model: Any, optimizers: list[Any], report: Callable[[str, str, str], None]) -> None:
    from torch_audit import autopatch

    class Reporter:
        def report(self, result: Any) -> None:
            for finding in result.findings:
                report(finding.rule_id, finding.severity.name, finding.message)

    optimizer = optimizers[-1] if optimizers else None
    AUDITORS.append(autopatch(model, optimizer=optimizer, every_n_steps=1, reporters=[Reporter()]))


def run_rank(rank: int, case: Case, tool: str, folder: str, port: int) -> None:
    """Runs a program on one rank, and appends the findings to a file."""
    os.chdir(folder)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    with Path(folder, f"{rank}.jsonl").open("w", buffering=1) as lines, Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        attach(lambda *finding: lines.write(json.dumps(finding) + "\n"), tool)
        lines.write(json.dumps(["begun", "", ""]) + "\n")
        try:
            run(case, rank)
        except Exception as error:
            lines.write(json.dumps(["failed", "", repr(error)]) + "\n")
            raise
        for auditor in AUDITORS:
            auditor.finish(report=True)
        lines.write(json.dumps(["ended", "", ""]) + "\n")


def run(case: Case, rank: int) -> None:
    """Runs a function, or trains a LightningModule for two epochs of three steps."""
    target = load_object(f"{case.path}:{case.target}")
    if case.target[:1].islower():
        target(*((rank, RANKS) if takes_rank(target, ()) else ()))
        return
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=2,
        limit_train_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(target(), datamodule=load_object(f"{case.path}:{case.data}")() if case.data else None)


def findings(case: Case, tool: str) -> tuple[dict[str, str], bool]:
    """Returns the warnings and errors of a tool by rule, and whether the program came to its end on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        port = 20000 + os.getpid() % 9000
        context = torch.multiprocessing.start_processes(
            run_rank, (case, tool, folder, port), RANKS, join=False, start_method="fork"
        )
        latest = time.monotonic() + SECONDS
        with suppress(Exception):
            while time.monotonic() < latest and not context.join(1.0):
                pass
        for process in context.processes:
            process.kill()
            process.join()
        seen = [line for path in Path(folder).glob("*.jsonl") for line in map(json.loads, path.open())]
    found = {rule: message for rule, level, message in seen if level in LEVELS}
    return found, sum(line[0] == "ended" for line in seen) == RANKS


def programs(words: list[str]) -> Iterator[Case]:
    """Yields the programs that are functions or modules of Lightning 2."""
    for case in (*CASES, *(case for cases in FAMILIES.values() for case in cases)):
        old = case.target.startswith("Old")
        if not case.command and not old and (not words or any(word in case.name for word in words)):
            yield case


def main(tool: str, words: list[str]) -> None:
    """Prints a line of JSON for each program, and the sums."""
    __import__(tool)
    faulty = healthy = named = alarms = 0
    for case in programs(words):
        found, ended = findings(case, tool)
        print(json.dumps({"name": case.name, "codes": case.codes, "found": found, "ended": ended}), flush=True)
        faulty, healthy = faulty + bool(case.codes), healthy + (not case.codes)
        named += any(NAMES.get(rule) in case.codes for rule in found)
        alarms += bool(found) and not case.codes
    print(f"{named} of {faulty} faults named, warnings for {alarms} of {healthy} healthy programs")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
