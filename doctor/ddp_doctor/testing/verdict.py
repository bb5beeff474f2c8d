"""Compares ranks with one process, and names what differs: by least squares, and by the derivative of the losses."""

from collections.abc import Mapping, Sequence
from math import inf, isclose, isnan, nan

import torch

from ddp_doctor.errors import InputError
from ddp_doctor.evidence.rank_comparison import Weights, is_multiple, solve
from ddp_doctor.faults import load_checks, short_fix
from ddp_doctor.testing.ranks import Case, Outcome, direction, move

# Relative, by the bits of the loss. In 64 bits healthy functions are below 1e-12; what a function computes in 32 bits
# leaves 1e-8 to 2e-6.
_SAME = {64: 1e-5, 32: 2e-4, 16: 0.05}
_SAME_QUOTIENT = {64: 1e-3, 32: 0.05, 16: 0.2}


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Returns the norm of the difference, relative to the second; infinity for other shapes and what is no number."""
    if a is None or b is None or a.shape != b.shape:
        return 0.0 if a is b else inf
    if torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        return 0.0
    found, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    return inf if isnan(found) else found / size if size else found


def applied(case: Case, ranks: Sequence[Outcome]) -> list[torch.Tensor]:
    """Returns the gradient that each rank applies: DistributedDataParallel takes the mean of those of a loss."""
    known = [rank.gradient for rank in ranks if rank.gradient is not None]
    return known if case.optimizer else [torch.stack(known).sum(0) / len(ranks)]


def differences(case: Case, ranks: Sequence[Outcome], one: Outcome) -> dict[str, float]:
    """Returns what differs from one process, by its name, with the relative amount; nothing if all is the same."""
    found = {name: max(distance(rank.values.get(name), value) for rank in ranks) for name, value in one.values.items()}
    if one.gradient is not None:
        found = {"gradient": max(distance(gradient, one.gradient) for gradient in applied(case, ranks))}
        found["loss"] = distance(_loss(ranks), one.values["loss"])
        before = case.model.state_dict() if case.model is not None else {}
        floats = {name: value for name, value in before.items() if value.is_floating_point()}
        # Where a gradient is noise, an update may be noise as well: compare with the largest one.
        update = max((float((one.state[name] - value).norm()) for name, value in floats.items()), default=0.0)
        for name, value in one.state.items():
            amount = max(float((rank.state[name].double() - value.double()).norm()) for rank in ranks)
            found[name] = amount / update if name in floats and update else amount
    return {name: amount for name, amount in found.items() if not amount <= _SAME[one.bits]}


def _loss(ranks: Sequence[Outcome]) -> torch.Tensor:
    return torch.stack([rank.values["loss"] for rank in ranks]).mean()


def report(
    case: Case,
    ranks: Sequence[Mapping[str, Outcome]],
    one: Mapping[str, Outcome],
    alone: Sequence[Outcome],
    found: Mapping[str, float],
    *,
    reference: bool,
) -> str:
    """Returns what is wrong and how to mend it, or nothing.

    Args:
        case: The function.
        ranks: What each rank computes, by how: `main`, the same `again`, with parameters moved to `plus` and `minus`,
            and with batch norm `over` the ranks.
        one: The same on one process with all samples.
        alone: One process with the samples of each rank.
        found: The differences.
        reference: Whether the ranks must agree with one process.

    Raises:
        InputError: The comparison says nothing.
    """
    main, whole = [rank["main"] for rank in ranks], one["main"]
    for runs in [*ranks, one]:
        first, again = runs["main"], runs["again"]
        pairs = [(again.values.get(name), value) for name, value in first.values.items()]
        if max(distance(*pair) for pair in [*pairs, (again.gradient, first.gradient)]) > _SAME[first.bits]:
            raise InputError(
                "The function computes something else when it is called again with the same weights, batch and seed: "
                "it keeps a state, which has to be a part of `model`, or it draws from a generator without a seed."
            )
    if whole.gradient is None:
        lines = [
            f"{name}: {_shown(whole.values[name])} on one process, "
            + ", ".join(f"{_shown(rank.values.get(name))} on rank {number}" for number, rank in enumerate(main))
            for name in found
        ]
        return _text("LD024", "it is not that of all samples", lines)
    own, share = _quotient(case, [one]), _quotient(case, ranks)
    same = isclose(share, own, rel_tol=_SAME_QUOTIENT[whole.bits])
    if not reference and not isclose(own, 1, rel_tol=_SAME_QUOTIENT[whole.bits]):
        raise InputError(
            f"On one process, the gradient is {own:.3g} times the derivative of the loss, as with a stopped gradient: "
            "without `reference`, there is nothing to compare with."
        )
    if same and not reference:
        return ""
    if whole.failures:
        raise InputError(f"One process cannot be given the random draws of the ranks: {whole.failures[0]}.")
    code, what = _name(case, ranks, whole, alone, found, share / own if not same else 1.0)
    (factor,), residual = _fit([whole.gradient], torch.stack(applied(case, main)).mean(0))
    lines = [
        f"loss: {float(_loss(main)):.9g} is the mean of the ranks, {float(whole.values['loss']):.9g} on one process",
        f"gradient: {factor:.6g} times that of one process, residual {residual:.1e}",
        f"derivative: the gradient is {share:.6g} times that of the ranks' losses; on one process, {own:.6g} times",
        *(f"{name}: differs by {amount:.1e}" for name, amount in found.items() if name not in {"loss", "gradient"}),
    ]
    return _text(code, what, lines)


def _quotient(case: Case, runs: Sequence[Mapping[str, Outcome]]) -> float:
    """Returns the applied gradient in a direction, divided by the difference quotient of the mean of the losses."""
    assert case.model is not None
    gradient = torch.stack(applied(case, [run["main"] for run in runs])).mean(0)
    plus, minus = (float(_loss([run[side] for run in runs])) for side in ("plus", "minus"))
    slope = (plus - minus) / (2 * move(runs[0]["main"].bits))
    return float(gradient @ direction(case.model)) / slope if slope else nan


def _fit(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> Weights:
    """Returns the weights of the parts in the whole, by least squares, and what they leave of it."""
    weights, residual = solve(parts, whole)
    return (weights, residual) if weights else ((nan,) * len(parts), inf)


def _name(
    case: Case,
    ranks: Sequence[Mapping[str, Outcome]],
    one: Outcome,
    alone: Sequence[Outcome],
    found: Mapping[str, float],
    share: float,
) -> tuple[str, str]:
    """Returns the code and the cause of a difference; `share` is what is applied of the derivative."""
    # Least squares explain what they leave less of.
    main, count, enough = [rank["main"] for rank in ranks], len(ranks), 10 * _SAME[one.bits]
    assert one.gradient is not None
    gradients = applied(case, main)
    mean = torch.stack(gradients).mean(0)
    for rank, outcome in enumerate(main):
        if not outcome.values["loss"].isfinite():
            return "LD013", f"the loss of rank {rank} is {float(outcome.values['loss'])}, as that of no labels"
    if set(found) == {"loss"}:
        return "LD024", "the reported loss, although the gradients agree"
    over = [rank["over"] for rank in ranks if "over" in rank]
    if over and not differences(case, over, one):
        return "LD012", "with the statistics of all ranks, the difference is gone"
    parts = [outcome.gradient for outcome in alone if outcome.gradient is not None]
    if max(distance(gradient, gradients[0]) for gradient in gradients) > enough:
        if all(is_multiple(gradient, part, enough) for part, gradient in zip(parts, gradients, strict=True)):
            return "LD009", "each rank steps with its own"
        return "LD011", "the ranks step with different gradients"
    (factor,), rest = _fit([one.gradient], mean)
    weights, left = _fit(parts, one.gradient)
    scaled = rest <= enough and abs(factor - 1) > enough
    # A step may also scale the gradient by itself, of a loss without a collective.
    if share != 1 and not (scaled and case.optimizer and left <= enough):
        return "LD015", (
            f"the ranks apply {share:.3g} times the derivative of what they compute: a collective passes no gradient "
            "to the samples of other ranks"
        )
    if scaled:
        return "LD014", f"{factor:.6g} times, as of a sum, or of a division that DDP makes again"
    if "gradient" in found and left <= enough:
        shares = ", ".join(f"{weight:.3g}" for weight in weights)
        return "LD013", f"the samples of the ranks count {shares} on one process, and {1 / count:.3g} each on ranks"
    if "gradient" in found:
        return "LD015", "negatives, statistics, or what else the loss takes from other samples, are those of a rank"
    changed = next(name for name in found if name != "loss")
    return "LD015", f"each rank updates {changed} with its own samples, although the gradients agree"


def _shown(value: torch.Tensor | None) -> str:
    return "nothing" if value is None else str(value.tolist())[:40]


def _text(code: str, what: str, lines: Sequence[str]) -> str:
    check = load_checks()[code]
    return "\n".join([f"{code} {check.TITLE}: {what}", *(f"  {line}" for line in lines), f"  Fix: {short_fix(check)}"])
