"""LD018: gradients are clipped before they are unscaled."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, fault, not_reached
from ddp_doctor.records.run import RankRecord
from ddp_doctor.source.file import Likely, SourceFile, keyword

TITLE = "Gradients are clipped before they are unscaled"
CAUSE = """\
A `GradScaler` multiplies the loss by a large number: before `unscale_`, clipping reduces every gradient to the limit.
The update then depends on the scale and is far too small, without an error.
"""
WRONG = """\
scaler.scale(loss).backward()
clip_grad_norm_(model.parameters(), 1.0)    # the gradients are still scaled
scaler.step(optimizer)
"""
FIX = """\
Unscale the gradients before clipping them:
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
"""
THREADS = ("pytorch/examples#1196", "milesial/Pytorch-UNet#468")
EXPLAINS = "weights"
_PRECISION = re.compile(r"amp|16|half|scaler|mixed|precision", re.IGNORECASE)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a clip in a function that scales the loss and steps with the scaler, and never unscales."""
    for clip in file.called("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
        scope = file.scope(clip)
        scales = [call for call in file.called("scale", within=scope) if _is_of_scaler(file, call)]
        steps = [call for call in file.called("step", within=scope) if _is_of_scaler(file, call)]
        if not scales or not steps or "unscale_" in ast.unparse(scope) or file.excluded(clip, scales[0]):
            continue
        # Under a condition of its own, it may belong to full precision.
        tests = [one.test for one in file.above(clip) if isinstance(one, ast.If) and not file.contains(one, scales[0])]
        if not any(_PRECISION.search(ast.unparse(test)) for test in tests):
            yield Likely(clip, "the gradients are clipped while they are scaled: the function never calls `unscale_`.")


def _is_of_scaler(file: SourceFile, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    makers = [value for _, value in file.assigned(owner) if isinstance(value, ast.Call)]
    made = any(file.name(maker.func).endswith("GradScaler") for maker in makers)
    given = [enabled for maker in makers if isinstance(enabled := keyword(maker, "enabled"), ast.Constant)]
    return (made or "scaler" in ast.unparse(owner).lower()) and not any(one.value is False for one in given)


def check(evidence: Evidence) -> list[Finding]:
    """Finds a clip between `scaler.scale` and `scaler.step` without `scaler.unscale_`."""
    if not any(record.of_kind("scale") for record in evidence.ranks):
        return [not_reached("No gradient scaler is used.")]
    for clip, scale in filter(None, map(_scaled_clip, evidence.ranks)):
        message = f"{clip['function']} runs while the gradients are scaled: scaler.unscale_ is not called before it."
        return [fault(message, clip["step"], "", f"limit {clip['limit']:g} for a scale of {scale:g}", clip["place"])]
    return []


def _scaled_clip(record: RankRecord) -> tuple[dict[str, Any], float] | None:
    """Returns the first clip of scaled gradients that are then applied, and their scale."""
    enabled = any(event["enabled"] for event in record.of_kind("scaler"))
    scale: float | None = None
    found: tuple[dict[str, Any], float] | None = None
    for event in record.of_kind("scale", "unscale", "scaler_step", "clip"):
        if event["kind"] == "scale":
            scale = event["scale"]
        elif event["kind"] == "clip":
            found = found or ((event, scale) if scale is not None else None)
        elif event["kind"] == "unscale":
            # What was clipped before stays clipped.
            scale = None
        else:
            if found and enabled:
                return found
            scale, found = None, None
    return None
