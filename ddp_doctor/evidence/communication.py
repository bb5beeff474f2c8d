"""What communication hooks make of the gradients, and whether the ranks average their weights instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import names_of
from ddp_doctor.records.run import RankRecord, Run

# A hook may compress: half precision and 8 bits change the length of a gradient by far less than this.
_SCALE = 0.05
# The scale of an approximation is not known better than this many times what it leaves.
_TIMES_RESIDUAL = 5
_SAME = 1e-4


@dataclass(frozen=True)
class HookEffect:
    """What the communication hooks returned in one step, compared with the mean of the ranks' gradients.

    Attributes:
        name: Name of the hook.
        place: The user's place of its registration.
        step: The step, from 0.
        scale: The result as a multiple of the mean, by least squares.
        residual: What this multiple leaves of the result, relative to the mean.
        equal: Whether all ranks got the same result.
        local: Whether each rank got its own gradient back.
    """

    name: str
    place: str
    step: int
    scale: float
    residual: float
    equal: bool
    local: bool

    @property
    def is_scaled(self) -> bool:
        """Whether the result is longer or shorter than the mean, by more than compression explains."""
        wrong = abs(self.scale - 1) > max(_SCALE, _TIMES_RESIDUAL * self.residual)
        return self.equal and self.scale > 0 and wrong

    @property
    def is_mean(self) -> bool:
        """Whether the result is a multiple of the mean, up to compression."""
        return self.equal and self.scale > 0 and self.residual <= _SCALE * self.scale


def hook_effects(run: Run | None) -> list[HookEffect]:
    """Returns what the communication hooks of a run did in each step; empty without hooks."""
    if run is None or not run.ranks or not run.ranks[0].of_kind("comm_hook"):
        return []
    event = run.ranks[0].of_kind("comm_hook")[0]
    keys: dict[int, list[str]] = {}
    for name in run.ranks[0].tensors:
        if name.startswith("hook_out/"):
            keys.setdefault(int(name.split("/")[1]), []).append(name.removeprefix("hook_out/"))
    found = []
    for step, buckets in sorted(keys.items()):
        given, results = ([_joined(rank, kind, buckets) for rank in run.ranks] for kind in ("hook_in", "hook_out"))
        parts, outs = [part for part in given if part is not None], [part for part in results if part is not None]
        if len({part.shape for part in [*parts, *outs]}) > 1 or {len(parts), len(outs)} != {len(run.ranks)}:
            continue
        mean = torch.stack(parts).mean(0)
        size = float(mean @ mean)
        if not size:
            continue
        scale = float(outs[0] @ mean) / size
        residual = float((outs[0] - scale * mean).norm()) / size**0.5
        equal = all(torch.equal(out, outs[0]) for out in outs)
        local = not equal and all(_close(out, part) for out, part in zip(outs, parts, strict=True))
        found.append(HookEffect(event["name"], event["place"], step, scale, residual, equal, local))
    return found


def _joined(rank: RankRecord, kind: str, keys: Sequence[str]) -> torch.Tensor | None:
    parts = [rank.tensors.get(f"{kind}/{key}") for key in keys]
    if any(part is None for part in parts):
        return None
    return torch.cat([part.flatten().double() for part in parts if part is not None])


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= _SAME * float(b.norm())


def averaged_weights(evidence: Evidence) -> str:
    """Returns how the ranks average their weights, as `PeriodicModelAverager`; empty if they do not."""
    run = evidence.worked("ranks")
    if run is None:
        return ""
    averages = [event["name"] for event in run.ranks[0].of_kind("average")]
    if averages:
        return f"by {averages[0]}"
    keys, steps = list(names_of(run.ranks[0])), len(run.ranks[0].of_kind("step"))
    return next((f"before step {step}" for step in range(1, steps) if _averaged_before(run.ranks, step, keys)), "")


def _averaged_before(ranks: Sequence[RankRecord], step: int, keys: Sequence[str]) -> bool:
    """Returns whether the weights of the ranks differ after a step, and are their mean before the next."""
    differ = False
    for key in keys:
        after = [rank.tensors.get(f"after/{step - 1}/{key}") for rank in ranks]
        begin = [rank.tensors.get(f"before/{step}/{key}") for rank in ranks]
        if any(tensor is None for tensor in [*after, *begin]):
            continue
        mean = torch.stack([tensor.double() for tensor in after if tensor is not None]).mean(0)
        if not all(tensor is not None and _close(tensor.double(), mean) for tensor in begin):
            return False
        differ = differ or any(tensor is not None and not _close(tensor.double(), mean) for tensor in after)
    return differ


def not_comparable(evidence: Evidence) -> dict[str, str]:
    """Returns why checks could not be made, by their codes."""
    found: dict[str, str] = {}
    if evidence.worked("ranks") and evidence.twin.cannot:
        reason = f"The ranks and one process were not compared: {evidence.twin.cannot}."
        found |= dict.fromkeys(("LD012", "LD013", "LD014", "LD015"), reason)
    if how := averaged_weights(evidence):
        reason = f"The ranks average their weights ({how}), and train different weights between."
        found |= dict.fromkeys(("LD009", "LD010", "LD011", "LD016"), reason)
    return found
