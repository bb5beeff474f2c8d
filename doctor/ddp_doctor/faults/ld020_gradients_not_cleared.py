"""LD020: gradients are never cleared."""

import ast
import re
from collections.abc import Iterator

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import two_steps
from ddp_doctor.findings import Finding, fault, listed
from ddp_doctor.source.file import Likely, SourceFile, names_in

TITLE = "Gradients are never cleared"
CAUSE = """\
`backward()` adds to the gradients: without `zero_grad()` after the step, each step applies the sum of all earlier ones.
This resembles a strong momentum, so that training may still make progress.
"""
WRONG = """\
loss.backward()
optimizer.step()    # the gradients of all steps so far are added
"""
FIX = """\
Set the gradients to zero after each optimizer step:
    optimizer.step()
    optimizer.zero_grad()
"""
THREADS = ("https://stackoverflow.com/questions/60335387", "facebookresearch/nwm#16")
NEEDS = (two_steps,)
_CLEARS = re.compile(r"zero_?grad|(clear|reset)_?grad|grad_?zero|set_to_none|zero_", re.IGNORECASE)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a loop that computes gradients and steps, and neither itself nor a function it calls clears them."""
    seen = set[ast.AST]()
    for backward in file.called("backward") if "torch.distributed.autograd" not in file.text else ():
        for step in file.called("step", within=next(iter(file.loops(backward)), ast.Pass())):
            owner = _optimizer(step)
            if owner is None or file.scope(step) is not file.scope(backward) or seen & {*file.loops(step)}:
                continue
            made = [statement for statement, _ in file.assigned(owner)]
            loops = [loop for loop in file.loops(backward) if not any(file.contains(loop, one) for one in made)]
            code = file.reached(loops[-1]) if loops else []
            assigns = (one for part in code for one in ast.walk(part) if isinstance(one, ast.Attribute))
            cleared = any(one.attr == "grad" and isinstance(one.ctx, ast.Store) for one in assigns)
            if code and not cleared and not any(map(_CLEARS.search, names_in(code))):
                seen.update(loops)
                calls = f"backward() and {ast.unparse(step.func)}()"
                yield Likely(step, f"the loop calls {calls}, and nothing clears gradients.")


def _optimizer(step: ast.Call) -> ast.expr | None:
    """Returns the optimizer that a call of `step` updates with."""
    if not isinstance(step.func, ast.Attribute):
        return None
    owner = step.func.value
    if re.search("scaler", ast.unparse(owner), re.IGNORECASE) and step.args:
        owner = step.args[0]
    text = ast.unparse(owner).lower()
    return owner if re.search(r"(^|[._])opt", text) and not re.search(r"sched|args|\blr", text) else None


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that an optimizer has applied, and that are present at the next backward pass."""
    for event in (event for record in evidence.trained for event in record.of_kind("step") if event["stale"]):
        stale = listed(event["stale"])
        message = f"The gradients of {stale}, which were applied, are applied again in step {event['step']}."
        return [fault(message, event["step"], event["stale"][0], place=event["place"])]
    return []
