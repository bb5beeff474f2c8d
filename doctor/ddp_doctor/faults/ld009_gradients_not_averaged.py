"""LD009: gradients are not averaged."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_doctor.evidence.communication import own_models
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.rank_comparison import names_of
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps, unmet
from ddp_doctor.findings import Finding, fault, listed, note
from ddp_doctor.lazy import torch
from ddp_doctor.source.file import MEDIUM, Likely, SourceFile, last

CODE = "LD009"
TITLE = "Gradients are not averaged"
CAUSE = """\
DDP prepares its all-reduce in its own `forward`: without it, or with a call of `ddp.module(x)`, the outputs are right
but the gradients stay on their rank. Each rank trains its own model, and rank 0 saves only its own.
"""
WRONG = """\
ddp = DistributedDataParallel(model)
loss = model(images, labels)    # not the wrapper: nothing is averaged
loss.backward()
"""
FIX = """\
Wrap the model, call the wrapper, and dispatch in `forward`; with Fabric, use `model.mark_forward_method(...)`:
    loss = ddp(batch)       # not ddp.module.loss(batch)
"""
THREADS = ("Lightning-AI/pytorch-lightning#17424",)
STRUCTURAL = True
EXPLAINS = "weights"
NEEDS = (optimizer_steps,)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a loop that trains through the bare model although the function has wrapped it."""
    for wrap in file.called("DistributedDataParallel", "DDP") if file.program.distributed else ():
        statement = next(file.above(wrap))
        if not isinstance(statement, ast.Assign) or not wrap.args:
            continue
        wrapper, bare = ast.unparse(statement.targets[0]), ast.unparse(wrap.args[0])
        for backward in (one for one in file.called("backward") if file.scope(one) is file.scope(wrap)):
            loop = next(iter(file.loops(backward)), None)
            calls = {ast.unparse(one.func): one for one in ast.walk(loop) if isinstance(one, ast.Call)} if loop else {}
            own = [
                call
                for name, call in calls.items()
                if (name == bare != wrapper or name == f"{wrapper}.module" or name.startswith(f"{wrapper}.module."))
                and last(call.func) not in _NO_PASS
                and not file.without_gradients(call)
                and wrapper not in calls
                and _leads_to(file, call, backward)
            ]
            for call in own[:1]:
                message = f"the loop trains through {ast.unparse(call.func)}, not through the wrapper {wrapper}."
                yield Likely(call, message, MEDIUM)


_NO_PASS = {"parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval", "zero_grad", "no_sync"}


def _leads_to(file: SourceFile, call: ast.Call, backward: ast.Call) -> bool:
    """Returns whether what a call returns may be in the loss."""
    statement = next(one for one in file.above(call) if isinstance(one, ast.stmt))
    return isinstance(statement, ast.Assign) and statement.lineno <= backward.lineno


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that stay on the rank that computed them."""
    if how := own_models(evidence):
        place = evidence.trained[0].of_kind("step")[0]["place"]
        return [note(f"Each rank trains a model of its own, {how}: nothing averages them.", 0, place=place)]
    found = first_divergence(evidence)
    if found is None:
        return unmet(evidence, averages_gradients)
    place, wrapped = found.place, evidence.ranks[0].of_kind("ddp")
    if found.hook:
        place = found.hook.place
        what = f"the communication hook {found.hook.name} returns it as it is"
    elif found.kind == "local" and not found.passes:
        # Where it is called, and leaves these gradients, it is LD010 or LD016.
        what = "DistributedDataParallel.forward is not called" if wrapped else "no model is wrapped"
        forwards = [event for event in evidence.ranks[0].of_kind("forward") if event["step"] == found.step]
        place = next((event["place"] for event in forwards if event["gradients"]), "") or place
    elif found.kind == "partly" and not wrapped:
        what = f"nothing averages those of {listed(found.parameters)}, unlike the others"
    elif found.kind == "other" and found.amount == 0.0 and (names := _initial_difference(evidence)):
        message = f"The ranks begin with different weights ({len(names)} parameters), and nothing makes them equal."
        return [fault(message, step=0, tensor=names[0], place=place)]
    else:
        return []
    return [fault(f"Each rank steps with its own gradient: {what}.", found.step, found.tensor, found.measured, place)]


def _initial_difference(evidence: Evidence) -> list[str]:
    """Returns the names of the parameters that differ between the ranks before the first step."""
    run = evidence.runs["ranks"]
    weights = {name: run.tensors(f"before/0/{key}") for key, name in names_of(run.ranks[0]).items()}
    return [name for name, found in weights.items() if not all(torch.equal(found[0], other) for other in found)]
