"""One function on several ranks, in a test: `assert_same_on_ranks`.

from ddp_doctor.testing import assert_same_on_ranks


def test_info_nce():
    assert_same_on_ranks(info_nce, model=Encoder, batch=batch, n=2)
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_doctor.errors import InputError
from ddp_doctor.probes.draws import RandomReplay
from ddp_doctor.probes.modules import normalize_over_ranks
from ddp_doctor.testing.ranks import Case, Outcome, conditions, evaluate, move, on_ranks, without_ranks
from ddp_doctor.testing.verdict import differences, report

__all__ = ["assert_same_on_ranks"]
# Computes each of some calls on a rank of its own.
Compute = Callable[[Sequence[Callable[[], Any]]], list[Any]]


def assert_same_on_ranks(
    function: Callable[..., Any],
    *,
    batch: Any,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    n: int = 2,
    splits: str = "equal",
    reference: bool = True,
    timeout: float = 60.0,
) -> None:
    """Asserts that a function computes on several ranks what it computes on one process with all samples.

    Compares the loss, the gradient that DistributedDataParallel applies, weights and buffers; or a metric on every
    rank. All of it is computed in 64 bits, with the same weights and random draws. No process is started for a function
    that asks nothing about ranks.

    Args:
        function: A loss, `function(model, shard)`; a step, `function(model, optimizer, shard)`, whose model is in
            DistributedDataParallel; or a metric, which returns numbers or an object with `compute()`, and is called as
            `function(shard)` without a model.
        batch: All samples: tensors, arrays, and lists of samples, of one length, in tuples, lists and mappings. A rank
            gets a part of it in the same form, and anything of another length as it is.
        model: The model, or what makes it. The function gets copies.
        optimizer: What makes the optimizer of a step from parameters.
        n: The number of ranks.
        splits: `equal` or `uneven`: the numbers of samples of the ranks.
        reference: False asks only whether the gradient is the derivative of the mean of the ranks' losses, for a loss
            that is meant to use the statistics or negatives of one rank.
        timeout: Seconds that a rank waits for others.

    Raises:
        AssertionError: Something differs: the code of the fault, the evidence and the fix.
        InputError: The function, or an argument, permits no comparison.
    """
    __tracebackhide__ = True
    if n < 2 or splits not in {"equal", "uneven"}:
        raise InputError(f"n is 2 or more, and splits `equal` or `uneven`; not {n} and {splits!r}.")
    if dist.is_initialized():
        raise InputError("This process has a process group; end it first: the ranks have one of their own.")
    with conditions():
        torch.manual_seed(0)
        made = model if model is None or isinstance(model, nn.Module) else model()
        case = Case(function, copy.deepcopy(made).to("cpu").double() if made is not None else None, optimizer)
        whole = _wide(batch)
        parts = _parts(_rows(whole), n, splits)
        compare = partial(_compare, case, whole, parts, reference)
        # DistributedDataParallel asks; and with GPUs, a fork permits no backward pass after one in this process.
        asks = optimizer or torch.cuda.is_available()
        text = None if asks else without_ranks(lambda: compare(lambda ranks: [rank() for rank in ranks]))
        if text is None:
            with RandomReplay():
                # The first operator, as an optimizer, imports what each fork would need seconds for.
                torch.ones(1)
            if case.model is not None and optimizer:
                optimizer(case.model.parameters())
            text = compare(partial(on_ranks, timeout=timeout))
    if text:
        raise AssertionError(text)


def _compare(case: Case, batch: Any, parts: Sequence[slice], reference: bool, compute: Compute) -> str:
    rows = _rows(batch)
    shards = [_take(batch, rows, part) for part in parts]
    main: list[Outcome] = compute([partial(evaluate, case, shard) for shard in shards])
    draws = [rank.draws for rank in main]
    (one,) = compute([partial(evaluate, case, batch, draws)])
    found = differences(case, main, one)
    if not found:
        return ""

    def on_one() -> tuple[dict[str, Outcome], list[Outcome]]:
        alone = [evaluate(case, shard, [own]) for shard, own in zip(shards, draws, strict=True)]
        return _measure(case, batch, draws, one), alone

    ranks = compute([partial(_measure, case, shard, None, own) for shard, own in zip(shards, main, strict=True)])
    ((whole, alone),) = compute([on_one])
    return report(case, ranks, whole, alone, found, reference=reference)


def _measure(case: Case, shard: Any, draws: Any, main: Outcome) -> dict[str, Outcome]:
    """Returns what the function computes, by how, as `report` describes it."""
    found = {"main": main, "again": evaluate(case, shard, draws)}
    if case.model is None or main.gradient is None:
        return found
    step = move(main.bits)
    found |= {name: evaluate(case, shard, draws, shift=to) for name, to in (("plus", step), ("minus", -step))}
    if any(isinstance(part, _BatchNorm) for part in case.model.modules()):
        with mock.patch.object(_BatchNorm, "forward", normalize_over_ranks):
            found["over"] = evaluate(case, shard, draws)
    return found


def _each(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        return {key: function(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    return type(batch)(map(function, batch)) if isinstance(batch, list | tuple) else batch


def _wide(batch: Any) -> Any:
    """Returns a batch on the CPU, with fractions in 64 bits."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().to("cpu", torch.float64 if batch.is_floating_point() else batch.dtype)
    return _each(batch, _wide)


def _rows(batch: Any) -> int:
    """Returns the number of samples: the length of the first tensor, or of lists of samples where there is none."""
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    lengths = [len(part) for part in parts if getattr(part, "shape", ())]
    if lengths and (len(set(lengths)) == 1 or len(lengths) < len(parts) or isinstance(batch, Mapping)):
        return lengths[0]
    if nested := [part for part in parts if isinstance(part, list | tuple)]:
        return len(nested[0])
    if isinstance(batch, list) and batch:
        return len(batch)
    raise InputError("The batch has no tensor, array or list whose length is the number of samples.")


def _parts(rows: int, n: int, splits: str) -> list[slice]:
    """Returns the samples of each rank."""
    if splits == "equal" and rows % n:
        raise InputError(f"{rows} samples on {n} ranks: choose another of `splits`.")
    sizes = [rows // n + (rank < rows % n) for rank in range(n)]
    if splits == "uneven" and rows % n == 0:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    if min(sizes) < 1:
        raise InputError(f"{rows} samples are too few for {n} ranks.")
    return [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(n)]


def _take(batch: Any, rows: int, part: slice) -> Any:
    """Returns a part of the samples."""
    if getattr(batch, "shape", ()):
        return batch[part] if len(batch) == rows else batch
    columns = isinstance(batch, list | tuple) and [len(column) for column in batch if getattr(column, "shape", ())]
    if isinstance(batch, list | tuple) and len(batch) == rows and columns != [rows] * rows:
        return batch[part]
    return _each(batch, lambda inner: _take(inner, rows, part))
