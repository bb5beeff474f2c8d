"""LD010: parameters were changed after the wrap."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps, wrapped
from ddp_doctor.findings import Finding, fault, listed
from ddp_doctor.source.file import MEDIUM, Likely, SourceFile, last

CODE = "LD010"
TITLE = "Parameters were changed after the wrap"
CAUSE = """\
DDP registers its hooks on the parameters that exist when it wraps the module: one that is assigned, moved, converted or
unfrozen later, or that belongs to another module, is never averaged. The ranks drift apart in it without a message.
"""
WRONG = """\
model = DistributedDataParallel(model)
model.module.head = nn.Linear(512, classes)    # DDP does not know its parameters
"""
FIX = """\
Change the module before wrapping it, and wrap it again after a change:
    model.head = nn.Linear(512, classes).to(device)
    model = DistributedDataParallel(model)
"""
THREADS = ("pytorch/pytorch#12603", "pytorch/pytorch#104336")
STRUCTURAL = True
EXPLAINS = "weights"
NEEDS = (wrapped, optimizer_steps, averages_gradients)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a layer that is assigned after the wrap."""
    for wrap in file.called("DistributedDataParallel", "DDP") if file.program.distributed else ():
        statement, scope = next(file.above(wrap)), file.scope(wrap)
        if not isinstance(statement, ast.Assign) or not wrap.args:
            continue
        wrapper, bare = ast.unparse(statement.targets[0]), ast.unparse(wrap.args[0])
        starts = (f"{wrapper}.module.", *([f"{bare}.", f"{bare}["] if bare != wrapper else []))
        for node in file.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and file.scope(node) is scope:
                name = file.name(node.value.func)
                layer = name.startswith("torch.nn.") and last(node.value.func)[:1].isupper() and "Parallel" not in name
                own = ast.unparse(node.targets[0]).startswith(starts)
                if node.lineno > wrap.lineno and layer and own and not file.excluded(node, wrap):
                    message = f"{ast.unparse(node.targets[0])} is assigned after the wrap in line {wrap.lineno}."
                    yield Likely(node, message, MEDIUM)


def check(evidence: Evidence) -> list[Finding]:
    """Finds parameters that DistributedDataParallel does not know, although its forward pass is called."""
    found = first_divergence(evidence)
    if found is None or found.kind not in {"partly", "local"} or found.hook:
        return []
    if not found.passes or not found.passes[-1]["synchronizes"]:
        return []
    message = f"DistributedDataParallel does not know {listed(found.parameters)}: each rank uses its own gradient."
    return [fault(message, found.step, found.tensor, found.measured, found.place)]
