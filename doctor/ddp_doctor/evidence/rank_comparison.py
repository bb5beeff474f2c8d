"""Compares ranks with one process that was given their batches, random draws and initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan

from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

# Healthy programs are below 1e-11 in 64 bits, faulty ones above 1e-3; a loss that the program computes in 32 bits
# leaves 1e-8 to 2e-6.
THRESHOLD = 1e-5
# How one process gets what the ranks had, the best first.
BATCHES = "one process got the recorded batches of all ranks, concatenated"
MICRO_BATCHES = "one process got the recorded micro-batches of the ranks, one after another"
# Relative: what differs by less in 32 bits is the same.
SAME = 1e-4
# Gradients are compared at up to this many coordinates.
_MOST_COORDINATES = 2_000_000
# The least-squares solution of `gradient = sum over ranks of weight * gradient of the rank`, and what it leaves of the
# gradient, relative; without weights if they are not known.
Weights = tuple[tuple[float, ...], float]


@dataclass(frozen=True)
class RankComparison:
    """How ranks differ from one process with the same samples.

    Attributes:
        difference: Largest difference of a gradient that an optimizer got, divided by the largest gradient, in the
            first step that differs, otherwise in the worst step.
        step: The step of `difference`.
        tensor: The parameter of `difference`.
        threshold: Above this, `difference` is no rounding.
        weights: Those of the ranks in the gradient of one process, before clipping; for a mean over equal shares they
            are 1 / ranks each.
        residual: What they leave.
        differences: The difference of each step.
        scale: What the optimizer of rank 0 got as a multiple of what that of one process got; 0 if it is not known.
        left: What this multiple leaves, relative.
        module: The first module whose outputs differ, with its class; empty if there is none.
        modules_seen: Whether the outputs of all modules are known.
        cannot: Why the comparison says nothing; empty if it does.
        method: How one process got what the ranks had: `BATCHES`, or `MICRO_BATCHES` where that is not possible; empty
            if it did not.
        limits: What this method does not show, and why no better one was possible; empty for `BATCHES`.
        passes: For each backward pass of rank 0, its weight in the gradient that the optimizer of this rank got, for a
            step of several passes; empty if these weights do not explain the gradient.
    """

    difference: float = 0.0
    step: int = 0
    tensor: str = ""
    threshold: float = THRESHOLD
    weights: tuple[float, ...] = ()
    residual: float = 0.0
    differences: tuple[float, ...] = ()
    scale: float = 0.0
    left: float = 0.0
    module: str = ""
    module_class: str = ""
    modules_seen: bool = True
    cannot: str = ""
    method: str = ""
    limits: str = ""
    passes: tuple[float, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the difference is no rounding."""
        return not self.cannot and not self.difference <= self.threshold

    @property
    def measured(self) -> str:
        """The difference in words."""
        return f"{self.difference:.1e} of the gradient"

    @property
    def is_weighted(self) -> bool:
        """Whether the gradient is a combination of those of the ranks, only with other weights."""
        return bool(self.weights) and self.residual <= max(self.threshold, 1e-6) * 10


def compare_ranks(ranks: Run, reference: Run, *, threshold: float = THRESHOLD) -> RankComparison:
    """Compares a run of several ranks with the run of one process that was fed from it."""
    if reference.hung or reference.lost or reference.errors or not reference.ranks:
        return RankComparison(cannot=f"one process with all samples fails ({reference.short_reason})")
    one = reference.ranks[0]
    if failures := one.end["failures"]:
        return RankComparison(cannot=f"one process cannot be given the same samples and draws: {failures[0]}")
    passes = [[len(event.get("passes", ())) for event in rank.of_kind("step")[:1]] for rank in (one, ranks.ranks[0])]
    if passes[0] != passes[1]:
        return RankComparison(cannot="one process makes another number of backward passes per optimizer step")
    before = unclipped(ranks)
    return compare_records(before, one if before is ranks else before_clipping(one), threshold=threshold)


def compare_records(ranks: Run, one: RankRecord, *, threshold: float, method: str = BATCHES) -> RankComparison:
    """Compares a run of several ranks with the record of one process that had the same samples and weights."""
    steps = sorted({int(name.split("/")[1]) for name in one.tensors if name.startswith("applied/")})
    if not steps:
        return RankComparison(cannot="no optimizer step was seen on one process")
    worst, differences = (0.0, 0, ""), []
    rates = [[event["lr"] for event in record.of_kind("step")] for record in (ranks.ranks[0], one)]
    for step in steps:
        # Another schedule is a separate finding, and changes all later gradients. Of a large network, the ranks record
        # the first steps alone.
        recorded = any(name.startswith(f"applied/{step}/") for name in ranks.ranks[0].tensors)
        if rates[0][:step] != rates[1][:step] or (step and not recorded):
            break
        found = _gradient_difference(ranks.ranks[0], one, step)
        if found is None:
            return RankComparison(cannot="the optimizers of one process have other parameters, or step at other times")
        differences.append(found[0])
        # The first step that differs, otherwise the worst.
        if worst[0] <= threshold and not found[0] <= worst[0]:
            worst = (found[0], step, found[1])
    difference, step, tensor = worst
    weights, residual = _weights(ranks, one, step)
    scale, left = solve([vector(one, step, "applied")], vector(ranks.ranks[0], step, "applied"))
    module, kind, seen = _first_module(ranks, one, max(threshold / 1000, 1e-9))
    return RankComparison(
        difference,
        step,
        tensor,
        threshold,
        weights,
        residual,
        differences=tuple(differences),
        scale=sum(scale),
        left=left,
        module=module,
        module_class=kind,
        modules_seen=seen,
        method=method,
        passes=passes_of_rank_0(ranks, step) if difference > threshold else (),
    )


def names_of(record: RankRecord) -> dict[str, str]:
    """Returns the names of the parameters by `<optimizer>:<position>`."""
    return {key: name for event in record.of_kind("step") for key, name in event["names"].items()}


def _gradient_difference(rank: RankRecord, one: RankRecord, step: int) -> tuple[float, str] | None:
    first, second = (
        {name: tensor for name, tensor in record.tensors.items() if name.startswith(f"applied/{step}/")}
        for record in (rank, one)
    )
    if first.keys() != second.keys() or any(first[name].shape != second[name].shape for name in first):
        return None
    size = max((float(tensor.abs().max()) for tensor in second.values() if tensor.numel()), default=0.0)
    amounts = {name: float((first[name] - second[name]).abs().max()) for name in first if first[name].numel()}
    # What is not a number is the worst.
    where = max(amounts, key=lambda name: (isnan(amounts[name]), amounts[name]), default="")
    worst = amounts.get(where, 0.0)
    return (worst / size if size else worst), names_of(rank).get(where.rpartition("/")[2], "")


def vector(record: RankRecord, step: int, what: str, thin: int = 1) -> torch.Tensor | None:
    """Returns the tensors of a kind in a step as one vector, or None if there are none.

    Of a large network, it has a part of the coordinates, divided by `thin`.
    """
    parts = [record.tensors[name].flatten() for name in sorted(record.tensors) if name.startswith(f"{what}/{step}/")]
    if not parts:
        return None
    whole = torch.cat(parts)
    return whole[:: max(1, len(whole) * thin // _MOST_COORDINATES)].double()


def _weights(ranks: Run, one: RankRecord, step: int) -> Weights:
    """Returns the weights of the ranks' gradients in that of one process: those that differ most of all passes."""

    def weights_of(what: str) -> Weights:
        return solve([vector(rank, step, what) for rank in ranks.ranks], vector(one, step, what))

    found = [weights_of(what) for what in _passes(one, step)]
    if not found or not all(weights for weights, _ in found):
        return weights_of("local")
    weights = max((weights for weights, _ in found), key=lambda weights: max(weights) - min(weights))
    return weights, max(residual for _, residual in found)


def passes_of_rank_0(ranks: Run, step: int) -> tuple[float, ...]:
    """Returns the weight of each backward pass of rank 0 in the gradient that its optimizer got, or nothing."""
    count = len(_passes(ranks.ranks[0], step))
    parts = [vector(rank, step, f"micro{number}", 1 + count) for rank in ranks.ranks for number in range(count)]
    weights, residual = solve(parts, vector(ranks.ranks[0], step, "applied", 1 + count))
    return weights[:count] if residual <= THRESHOLD else ()


def _passes(record: RankRecord, step: int) -> list[str]:
    """Returns the kinds of tensors that the backward passes of a step have, such as `micro0`."""
    kinds = {tuple(name.split("/")[:2]) for name in record.tensors if name.startswith("micro")}
    return sorted(kind for kind, number in kinds if number == str(step))


def solve(parts: Sequence[torch.Tensor | None], whole: torch.Tensor | None) -> Weights:
    """Returns the weights of vectors in another one by least squares, and what they leave of it."""
    known = [part for part in parts if part is not None and whole is not None and part.shape == whole.shape]
    if whole is None or not known or len(known) < len(parts) or not float(whole.norm()):
        return (), 0.0
    columns = torch.stack(known, 1)
    if not (columns.isfinite().all() and whole.isfinite().all()):
        # An overflow, which GradScaler skips, has no weights.
        return (), 0.0
    solution = torch.linalg.lstsq(columns, whole[:, None], driver="gelsd").solution[:, 0]
    residual = float((columns @ solution - whole).norm() / whole.norm())
    return tuple(float(value) for value in solution), residual


def _first_module(ranks: Run, one: RankRecord, threshold: float) -> tuple[str, str, bool]:
    """Returns the first module whose outputs differ, its class, and whether all modules were seen."""
    from ddp_doctor.probes.draws import joining_axis

    records = [*ranks.ranks, one]
    calls = [_outputs(record) for record in records]
    seen = all(found.keys() == calls[0].keys() for found in calls)
    for call in (call for call in calls[0] if all(call in found for found in calls)):
        *parts, whole = [record.tensors[found[call]] for record, found in zip(records, calls, strict=True)]
        if all(part.shape == whole.shape for part in parts):
            joined = parts[0]
        elif (axis := joining_axis(parts, whole)) is not None:
            joined = torch.cat(parts, axis)
        else:
            continue
        pairs = (joined, whole), (_sorted_rows(joined), _sorted_rows(whole))
        if not any(distance(*pair) <= threshold for pair in pairs):
            return call[0], call[1], seen
    return "", "", seen


def _outputs(record: RankRecord) -> dict[tuple[str, str, int], str]:
    """Returns the names of the recorded outputs by module, class, and number of the call.

    Numbers are left out: no later module depends on a loss, which only a wrapped LightningModule returns.
    """
    found: dict[tuple[str, str, int], str] = {}
    for event in record.of_kind("output"):
        name = f"out/{event['number']}"
        # Of micro-batches, the outputs are not compared.
        if name in record.tensors and record.tensors[name].ndim:
            number = sum(key[:2] == (event["name"], event["module"]) for key in found)
            found[event["name"], event["module"], number] = name
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest value."""
    size = max(float(a.abs().max()), float(b.abs().max())) if a.numel() else 0.0
    return float((a - b).abs().max()) / size if size else 0.0


def is_multiple(a: torch.Tensor, b: torch.Tensor, tolerance: float = SAME) -> bool:
    """Returns whether one tensor is a multiple of the other, up to this part of its length."""
    x, y = a.double().flatten(), b.double().flatten()
    if not y.any() or not x.any():
        return not x.any() and not y.any()
    return float((x - (x @ y) / (y @ y) * y).norm() / x.norm()) < tolerance


def _sorted_rows(outputs: torch.Tensor) -> torch.Tensor:
    """Returns a number per sample, sorted: a program may stack several views of a batch in one call."""
    rows = outputs.detach().double().flatten(1) if outputs.ndim > 1 else outputs.detach().double()[:, None]
    generator = torch.Generator().manual_seed(0)
    return (rows @ torch.rand(rows.shape[1], generator=generator, dtype=torch.float64)).sort().values


def unclipped(run: Run) -> Run:
    """Returns a run with the gradients before clipping, which makes those of different lengths equal.

    Gradients that the ranks clip before they share them stay as they are.
    """
    for name in _clipped(run.ranks[0]):
        own = run.tensors(f"unclipped/{name}")
        if not own or any(not torch.equal(a, b) for a, b in pairwise(own)):
            return run
    return replace(run, ranks=[before_clipping(rank) for rank in run.ranks])


def _clipped(record: RankRecord) -> list[str]:
    """Returns the parameters whose gradients were clipped and applied; a step may leave others alone."""
    names = [name.removeprefix("unclipped/") for name in record.tensors if name.startswith("unclipped/")]
    return [name for name in names if f"applied/{name}" in record.tensors]


def before_clipping(record: RankRecord) -> RankRecord:
    """Returns a record with the gradients before clipping as those that were applied."""
    unclipped = {f"applied/{name}": record.tensors[f"unclipped/{name}"] for name in _clipped(record)}
    return replace(record, tensors=record.tensors | unclipped)
