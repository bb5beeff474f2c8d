"""Whether the ranks average their weights or train models of their own, instead of averaging gradients."""

from __future__ import annotations

from collections import Counter

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import SAME, is_multiple, names_of
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import Run

# A vector with the weights of a model has up to so many times their numbers, and these.
_MORE, _FEW = 1.25, 8


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= SAME * float(b.norm())


def averaged_weights(run: Run | None) -> str:
    """Returns how the ranks of a run average their weights, as `PeriodicModelAverager`; empty if they do not."""
    if run is None:
        return ""
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
    rest = [key for key in keys if key.partition(":")[0] not in reached]
    values = (evidence.runs["ranks"].tensors(f"before/0/{key}") for key in rest)
    return any(not torch.equal(value, own[0]) for own in values for value in own)


def own_weights(evidence: Evidence) -> str:
    """Returns why the ranks do not average gradients of whole parameters, or nothing."""
    if shards(evidence):
        return "each rank holds a part of the parameters only"
    if how := averaged_weights(evidence.worked("ranks")):
        return f"the ranks average their weights ({how}), and train different weights between"
    how = own_models(evidence)
    return f"each rank trains a model of its own, {how}" if how else ""


def own_models(evidence: Evidence) -> str:
    """Returns by what each rank trains a model of its own on purpose, as in a search or a cross-validation, or nothing.

    Its gradient is not averaged, and the learning rates differ from the first step on, or each rank saves its model in
    a file of its own.
    """
    ranks = evidence.trained
    if len(ranks) < 2 or any(rank.of_kind("ddp") for rank in ranks) or averaged_weights(evidence.worked("ranks")):
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
