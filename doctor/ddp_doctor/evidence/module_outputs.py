"""Finds the first module whose outputs on the ranks are not those of one process."""

from __future__ import annotations

import torch

from ddp_doctor.probes.draws import joining_axis
from ddp_doctor.records.run import RankRecord, Run


def first_module(ranks: Run, one: RankRecord, threshold: float) -> tuple[str, str, float, bool]:
    """Returns the first module whose outputs differ, its class, by how much, and whether all modules were seen."""
    records = [*ranks.ranks, one]
    calls = [_outputs(record) for record in records]
    seen = all(found.keys() == calls[0].keys() for found in calls)
    for call in calls[0]:
        if not all(call in found for found in calls):
            continue
        *parts, whole = [record.tensors[found[call]] for record, found in zip(records, calls, strict=True)]
        if all(part.shape == whole.shape for part in parts):
            joined = parts[0]
        elif (axis := joining_axis(parts, whole)) is not None:
            joined = torch.cat(parts, axis)
        else:
            continue
        amount = _relative(joined, whole)
        if not amount <= threshold and not _relative(_sorted_rows(joined), _sorted_rows(whole)) <= threshold:
            return call[0], call[1], amount, seen
    return "", "", 0.0, seen


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


def _relative(joined: torch.Tensor, whole: torch.Tensor) -> float:
    size = float(whole.abs().max()) if whole.numel() else 0.0
    return float((joined - whole).abs().max()) / size if size else 0.0


def _sorted_rows(outputs: torch.Tensor) -> torch.Tensor:
    """Returns a number per sample, sorted: a program may stack several views of a batch in one call."""
    rows = outputs.detach().double().flatten(1) if outputs.ndim > 1 else outputs.detach().double()[:, None]
    generator = torch.Generator().manual_seed(0)
    return (rows @ torch.rand(rows.shape[1], generator=generator, dtype=torch.float64)).sort().values
