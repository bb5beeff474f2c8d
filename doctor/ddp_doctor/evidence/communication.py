"""What communication hooks make of the gradients, and whether the ranks average their weights instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import SAME, is_multiple, names_of
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

# A hook may compress: half precision and 8 bits change the length of a gradient by far less than this.
_SCALE = 0.05
# The scale of an approximation is not known better than this many times what it leaves.
_TIMES_RESIDUAL = 5
# A vector with the weights of a model has up to so many times their numbers, and these.
_MORE, _FEW = 1.25, 8


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
    events = run.ranks[0].of_kind("comm_hook") if run and run.ranks else []
    if run is None or not events:
        return []
    found = []
    buckets = [name.removeprefix("hook_out/") for name in run.ranks[0].tensors if name.startswith("hook_out/")]
    for step in sorted({int(key.split("/")[0]) for key in buckets}):
        given, results = (
            [_joined(rank, kind, [key for key in buckets if key.startswith(f"{step}/")]) for rank in run.ranks]
            for kind in ("hook_in", "hook_out")
        )
        if len({len(part) for part in [*given, *results]}) > 1:
            continue
        mean = torch.stack(given).mean(0)
        if size := float(mean @ mean):
            scale = float(results[0] @ mean) / size
            residual = float((results[0] - scale * mean).norm()) / size**0.5
            equal = all(torch.equal(result, results[0]) for result in results)
            local = not equal and all(map(_close, results, given))
            found.append(HookEffect(events[0]["name"], events[0]["place"], step, scale, residual, equal, local))
    return found


def _joined(rank: RankRecord, kind: str, keys: Sequence[str]) -> torch.Tensor:
    """Returns the buckets of a step as one vector."""
    parts = [rank.tensors[name].flatten().double() for key in keys if (name := f"{kind}/{key}") in rank.tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= SAME * float(b.norm())


def averaged_weights(evidence: Evidence) -> str:
    """Returns how the ranks average their weights, as `PeriodicModelAverager`; empty if they do not."""
    run = evidence.worked("ranks")
    return averaged_weights_of(run) if run else ""


def averaged_weights_of(run: Run) -> str:
    """Returns the same for a run of several ranks."""
    if averages := run.ranks[0].of_kind("average"):
        return f"by {averages[0]['name']}"
    keys, steps = list(names_of(run.ranks[0])), len(run.ranks[0].of_kind("step"))
    exact = next((f"before step {step}" for step in range(1, steps) if _averaged_before(run, step, keys)), "")
    return exact or _reduced_at_times(run, keys, steps)


def _reduced_at_times(run: Run, keys: list[str], steps: int) -> str:
    """Returns when the ranks reduce or gather tensors of all weights' sizes, if that is between few of the steps.

    As in federated training, the average may be one of copies, which belong to no optimizer. Sizes of gradients that
    the program averages by itself are seen in most steps.
    """
    known = [found[0].numel() for key in keys if (found := run.tensors(f"before/0/{key}"))]
    seen: dict[int, Counter[int]] = {}
    for event in run.ranks[0].of_kind("collective"):
        if any(word in event["op"] for word in ("reduce", "gather")):
            seen.setdefault(event["step"], Counter())[event.get("size", 0)] += 1
    total = sum(known)
    # One by one, or as one vector, which may also contain the statistics of batch norm and a number of samples.
    times = [
        step
        for step, sizes in seen.items()
        if not Counter(known) - sizes or any(total <= size <= _MORE * total + _FEW for size in sizes)
    ]
    # A model with one tensor can have the size of a metric.
    return f"before step {min(times)}" if len(known) > 1 and times and min(times) and 2 * len(times) <= steps else ""


def _averaged_before(run: Run, step: int, keys: list[str]) -> bool:
    """Returns whether the weights of the ranks differ after a step, and are their mean before the next.

    Weights that one rank owns, as the rows of its own users, are not averaged.
    """
    differ, apart = False, list[str]()
    for key in keys:
        after, begin = run.tensors(f"after/{step - 1}/{key}"), run.tensors(f"before/{step}/{key}")
        # A step that one rank takes alone may be one of another model.
        if after and begin and len({tensor.shape for tensor in (*after, *begin)}) == 1:
            mean = torch.stack(after).double().mean(0)
            if not all(_close(tensor.double(), mean) for tensor in begin):
                apart.append(key)
            else:
                differ = differ or not all(_close(tensor.double(), mean) for tensor in after)
    return differ and all(_has_owners(run, step, key) for key in apart)


def _has_owners(run: Run, step: int, key: str) -> bool:
    """Returns whether no element of a parameter was changed by two ranks before a step."""
    first, begin = run.tensors(f"before/0/{key}"), run.tensors(f"before/{step}/{key}")
    if len({tensor.shape for tensor in (*first, *begin)}) > 1:
        return False
    changes = torch.stack([before != now for before, now in zip(first, begin, strict=True)])
    return bool((changes.sum(0) <= 1).all())


def shards(evidence: Evidence) -> bool:
    """Returns whether each rank holds a part of the parameters only, so that those of two ranks are not to be equal."""
    ranks = evidence.ranks
    if any(event.get("sharded") for rank in ranks for event in rank.of_kind("step")[:1]):
        return True
    # An optimizer may have tensors of the rank, as slices of the parameters. Backward passes reach parameters alone.
    keys = list(names_of(ranks[0])) if len(ranks) > 1 else []
    reached = {key.partition(":")[0] for key in keys for rank in ranks if f"local/0/{key}" in rank.tensors}
    for key in keys:
        values = [rank.tensors[name] for rank in ranks if (name := f"before/0/{key}") in rank.tensors]
        differ = len(values) == len(ranks) and any(not torch.equal(value, values[0]) for value in values)
        if differ and key.partition(":")[0] not in reached:
            return True
    return False


def own_models(evidence: Evidence) -> str:
    """Returns by what each rank trains a model of its own on purpose, as in a search or a cross-validation, or nothing.

    Its gradient is not averaged, and the learning rates differ from the first step on, or each rank saves its model in
    a file of its own.
    """
    ranks = evidence.trained
    if len(ranks) < 2 or any(rank.of_kind("ddp") for rank in ranks) or averaged_weights(evidence):
        return ""
    pairs = [
        [rank.tensors.get(f"{kind}/0/{key}") for kind in ("applied", "local")]
        for rank in ranks
        for key in names_of(rank)
    ]
    # A single value is a multiple of any other.
    known = [(a, b) for a, b in pairs if a is not None and b is not None and b.numel() > 1]
    if not known or not all(is_multiple(*pair) for pair in known):
        return ""
    if len({tuple(event.get("lr", ())) for rank in ranks for event in rank.of_kind("step")[:1]}) > 1:
        return "with another learning rate from the start"
    files = [{event["path"] for event in rank.of_kind("save")} for rank in ranks]
    models = all(
        any(len(event["tensors"]) >= len(event["weights"]) > 0 for event in rank.of_kind("saved")) for rank in ranks
    )
    return "which it saves in a file of its own" if models and all(files) and not set.intersection(*files) else ""
