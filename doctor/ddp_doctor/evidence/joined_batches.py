"""Whether the batches and draws of several ranks can be given to one process at once."""

from __future__ import annotations

from ddp_doctor.records.run import Run


def why_not_joined(ranks: Run) -> str:
    """Returns why one process cannot be given the batches of the ranks at once, as far as the ranks show it."""
    if not all(any(event["trains"] for event in record.of_kind("batch")) for record in ranks.ranks):
        return "the samples come from no DataLoader of torch"
    if hidden := _hidden_draws(ranks):
        return hidden
    first = ranks.ranks[0].tensors
    for name in [name for name in first if name.startswith("batch/")]:
        parts = ranks.tensors(name)
        if any(part.ndim and part.shape[1:] != parts[0].shape[1:] for part in parts):
            return "the batches of the ranks have other shapes, as after padding to the longest sample"
    return ""


def _hidden_draws(ranks: Run) -> str:
    """Returns why draws of NumPy or Python in a training step cannot be given to one process, or nothing."""
    for record in ranks.ranks:
        for event in record.of_kind("drew"):
            if event["hidden"]:
                return (
                    f"the training step draws random numbers of {event['hidden']}, which cannot be given to one process"
                )
    return ""
