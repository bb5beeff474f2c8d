"""LD022: dropout is active in evaluation."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import evaluation
from ddp_doctor.findings import Finding, fault, listed, note
from ddp_doctor.records.run import RankRecord
from ddp_doctor.source.file import Likely, SourceFile, keyword

TITLE = "Dropout is active in evaluation"
CAUSE = """\
Functional dropout does not know the module's mode: `F.dropout(x)` is active by default, so that the metric of an
evaluation changes from pass to pass. A single number per epoch does not show it.
"""
WRONG = """\
def forward(self, x):
    return F.dropout(self.layer(x), 0.5)    # training=True is the default
"""
FIX = """\
Pass the module's mode to functional dropout:
    F.dropout(x, p, training=self.training)
    F.scaled_dot_product_attention(q, k, v, dropout_p=p if self.training else 0.0)
"""
THREADS = ("pytorch/pytorch#124464", "deepchem/deepchem#5092")
NEEDS = (evaluation,)
_ON_PURPOSE = re.compile(r"train|augment|corrupt|prenet|mc_|bayes|uncertain|monte", re.IGNORECASE)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds functional dropout in a module that does not say whether it trains: it is then always active."""
    if file.program.mentions("backward(") and not file.program.mentions("eval(", "no_grad", "inference_mode"):
        # The whole program is read, and has no evaluation.
        return
    for call in file.called("dropout", "dropout1d", "dropout2d", "dropout3d"):
        scope, owner = file.scope(call), file.class_of(call)
        if not file.name(call.func).startswith("torch.nn.functional.") or owner is None or keyword(call, "training"):
            continue
        tests = [ast.unparse(one.test) for one in file.above(call) if isinstance(one, ast.If | ast.IfExp)]
        told = " ".join([getattr(scope, "name", ""), owner.name, *tests])
        rate = keyword(call, "p") or (call.args[1] if len(call.args) > 1 else None)
        off = isinstance(rate, ast.Constant) and not rate.value
        given = len(call.args) > 2 or any(isinstance(one, ast.Starred) for one in call.args)
        if not given and not off and not _ON_PURPOSE.search(told):
            yield Likely(call, "functional dropout without `training=` is active in evaluation, too.")


def check(evidence: Evidence) -> list[Finding]:
    """Finds dropout while a loader that is not trained on is evaluated without gradients."""
    notes = []
    for record in evidence.ranks:
        for event, forward in _dropouts(record):
            modes, active = (forward["modes"], forward["random"]) if forward else ({}, [])
            where = event["step"], next(iter(active), ""), "", event["place"]
            message = f"In evaluation, dropout is active in {listed(active) or 'the model'}"
            if not active or all(modes.values()):
                why = "eval() is not called" if modes and all(modes.values()) else "it ignores the mode of the model"
                return [fault(f"{message}: {why}.", *where)]
            notes.append(note(f"{message}, but the other parts are in evaluation mode.", *where))
    return notes[:1]


def _dropouts(record: RankRecord) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yields each dropout in evaluation, with the forward pass that it belongs to."""
    trained = {epoch["loader"] for epoch in record.training_epochs}
    batch, forward = None, None
    for event in record.of_kind("batch", "forward", "dropout", "backward"):
        if event["kind"] == "batch":
            batch, forward = event, None
        elif event["kind"] == "forward":
            forward = event
        elif event["kind"] == "backward":
            batch = None
        elif batch is not None and batch["loader"] not in trained:
            yield event, forward
