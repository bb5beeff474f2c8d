"""Injects faults into the healthy programs of the suite by changing their source, and counts those that are found.

The order is that of a fixed seed: first one program of every kind with every fault, then a second one, and so on.
README.md says how it is run.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from projects.cases import CASES, FAMILIES, Case
from suite import examine_case

RESULTS = Path(__file__).parents[1] / "build" / "mutations.json"
SEED = 0
REPORTED = {"fault", "depends on the number of devices"}


@dataclass(frozen=True)
class Mutation:
    """A fault, as a change of the source.

    Attributes:
        name: What is changed.
        codes: The codes of which one should report it.
        changes: Patterns, and what replaces them.
        needs: The pattern of a text without which the fault has no effect in a program.
        without: Texts with which the changed program would not run, or be no fault.
        note: Whether a note says what is wrong, as for equal dropout masks.
    """

    name: str
    codes: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    needs: str = ""
    without: tuple[str, ...] = ()
    note: bool = False

    def apply(self, program: str) -> str:
        """Returns the changed program; it is the same if it cannot have the fault."""
        if re.search(self.needs, program) and not any(word in program for word in self.without):
            for old, new in self.changes:
                program = re.sub(old, new, program, flags=re.MULTILINE)
        return program


def _removed(call: str) -> tuple[str, str]:
    """Removes the statements that are this call."""
    return rf"^( *)\S*{call}\(.*\)$", r"\1pass"


def _scaled(factor: str) -> tuple[tuple[str, str], ...]:
    """Scales what is differentiated, or what a training step returns."""
    return (
        (r"^( *)(\S.*)\.backward\(\)$", rf"\1((\2) {factor}).backward()"),
        (r"backward\((.+)\)$", rf"backward((\1) {factor})"),
        (r"^(    def training_step.*\n(?:(?: {8}.*)?\n)*? {8}return) (\w.*)$", rf"\1 (\2) {factor}"),
    )


# Also in a program that starts no process group on one process.
_GROUP = "torch.distributed.is_initialized()"
_RANKS = f"(torch.distributed.get_world_size() if {_GROUP} else 1)"
_IF_RANK_0 = f"if not {_GROUP} or torch.distributed.get_rank() == 0:"
_CLIP = r"torch.nn.utils.clip_grad_norm_([value for group in \2.param_groups for value in group['params']], 1e-3)"
_NO_EPOCH = _removed(r"\.set_epoch")
_NO_SAMPLER = r"\bDistributedSampler\((\w+(?:\(\w*\))?)[^()]*\)", r"torch.utils.data.RandomSampler(\1)"
_ONE_SEED = r"\b(seed\w*|manual_seed)\((?:[^()]|\(\))*rank(?:[^()]|\(\))*\)", r"\1(1000)"
_DRAWS = r"[Dd]ropout|rand\w*_like|np\.random|torch\.rand\w*\((?:len|\(\))|Beta|sample\(\)"
_BARE = r"\bDDP\((\w+(?:\(\))?)[^()]*\)", r"\1"
_NOT_BARE = (".module", "no_sync", "comm_hook", "broadcast_buffers")
_CLIPPED = r"^( *)([\w.\[\]]*optimizer\w*)\.step\(\)$", rf"\1{_IF_RANK_0}\n\1    {_CLIP}\n\1\2.step()"
_EARLY = (r"(\S+) if (\S.*?) else (model\.no_sync\(\))", r"\3 if \2 else \1"), (r"enabled=not (\w+)", r"enabled=\1")
_OFTEN = r"^( *)(\w*schedule\w*\.step\(\))$", rf"\1for _ in range({_RANKS}):\n\1    \2"
_INCOMPLETE = r"(optim\.\w+\()([\w.\[\]]+\.parameters\(\))", r"\1list(\2)[1:]"
_ALONE = r"^( *)dist\.barrier\(\)$", rf"\1{_IF_RANK_0}\n\1    dist.barrier()"
_SAVED_BY_ALL = r"^( *)if .*rank.*:\n(?=(?:\1    .*\n)*?\1    .*torch\.save\()", r"\1if True:\n"
MUTATIONS = (
    Mutation("set_epoch removed", ("LD001",), (_NO_EPOCH,), without=("shuffle=False",)),
    Mutation("DistributedSampler removed", ("LD002",), (_NO_SAMPLER, _NO_EPOCH), r"DistributedSampler\("),
    Mutation("one seed for all ranks", ("LD008",), (_ONE_SEED,), _DRAWS, note=True),
    Mutation("wrapper removed", ("LD009",), (_BARE,), without=_NOT_BARE),
    Mutation("rank 0 clips", ("LD011",), (_CLIPPED,), without=("averager", "average")),
    Mutation("loss divided by the ranks", ("LD014",), _scaled(f"/ {_RANKS}")),
    Mutation("loss times the ranks", ("LD014",), _scaled(f"* {_RANKS}")),
    Mutation("no_sync of the last micro-batch", ("LD016",), _EARLY, "sync"),
    Mutation("schedule steps per process", ("LD017",), (_OFTEN,)),
    Mutation("unscale_ removed", ("LD018",), (_removed(r"\.unscale_"),)),
    Mutation("optimizer without the first parameter", ("LD019",), (_INCOMPLETE,)),
    Mutation("zero_grad removed", ("LD020",), (_removed(r"\.zero_grad"),)),
    Mutation("train() removed", ("LD021",), (_removed(r"model\.train"),), r"\.eval\(\)"),
    Mutation("reduction of the metric removed", ("LD024",), (_removed(r"dist\.all_reduce"),), r"print\("),
    Mutation("sync_dist removed", ("LD024",), (("sync_dist=True", "sync_dist=False"),), note=True),
    Mutation("barrier of rank 0", ("LD027", "LD034"), (_ALONE,)),
    Mutation("all ranks save", ("LD032",), (_SAVED_BY_ALL,)),
    Mutation("group not destroyed", ("LD032",), (_removed("destroy_process_group"),), note=True),
)


@dataclass(frozen=True)
class Mutant:
    """A healthy program with a fault: the changed program, and the fault."""

    case: Case
    mutation: Mutation

    @property
    def name(self) -> str:
        """Such as `set_epoch removed: accumulation_no_sync`."""
        return f"{self.mutation.name}: {self.case.name}"

    @property
    def kind(self) -> str:
        """`function`, `module` (of Lightning), `command`, or `library` (Accelerate, Transformers or Fabric)."""
        if any(word in self.case.text for word in ("Accelerator(", "TrainingArguments(", "Fabric(")):
            return "library"
        if self.case.command:
            return "command"
        return "module" if self.case.target[0].isupper() else "function"


def mutants() -> list[Mutant]:
    """Returns each healthy program with each fault that applies: one of each fault and kind, then a second one."""
    healthy = [case for cases in (CASES, *FAMILIES.values()) for case in cases if not case.codes]
    found = [
        Mutant(replace(case, text=text), mutation)
        for case in healthy
        for mutation in MUTATIONS
        if (text := mutation.apply(case.text)) != case.text
    ]
    found.sort(key=lambda mutant: random.Random(f"{SEED} {mutant.name}").random())  # noqa: S311
    rounds = Counter[tuple[str, str]]()
    keys = {}
    for place, mutant in enumerate(found):
        cell = mutant.mutation.name, mutant.kind
        keys[mutant.name] = rounds[cell], place
        rounds[cell] += 1
    return sorted(found, key=lambda mutant: keys[mutant.name])


def examined(mutant: Mutant) -> dict[str, Any]:
    """Returns what the doctor says of a mutant, and whether one of the expected codes is reported."""
    report = examine_case(mutant.case).report
    wanted = {*REPORTED, "note"} if mutant.mutation.note else REPORTED
    expected = [finding for finding in report.findings if finding.code in mutant.mutation.codes]
    return {
        "fault": mutant.mutation.name,
        "found": any(finding.verdict.value in wanted for finding in expected),
        "findings": [f"{finding.code} {finding.verdict.value}" for finding in report.findings],
        "states": [f"{one.code} {one.state.value}" for one in report.checks if one.code in mutant.mutation.codes],
        "error": (report.error or report.hang).strip()[-200:],
        "seen": time.strftime("%Y-%m-%d"),
    }


def main(words: list[str]) -> int:
    """Examines mutants that are named, or else those that were not examined, and returns 1 if one is not found."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    missed = 0
    for mutant in mutants():
        if any(word in mutant.name for word in words) if words else mutant.name not in results:
            results[mutant.name] = result = examined(mutant)
            RESULTS.write_text(json.dumps(results, indent=1))
            missed += not result["found"]
            print(f"{mutant.name} ({mutant.kind}): {result}", flush=True)
    for mutation in MUTATIONS:
        outcomes = [result["found"] for result in results.values() if result["fault"] == mutation.name]
        print(f"{mutation.name} ({' or '.join(mutation.codes)}): {sum(outcomes)} of {len(outcomes)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
