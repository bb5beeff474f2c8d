"""The entry of ExactCheckpoint in a checkpoint: the state of each rank, or one for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_mnist.errors import require
from lit_mnist.plugins.plain_values import as_bytes, as_tensor, pack, unpack
from lit_mnist.plugins.trainer_state.sums import merge_metrics, merge_results

KEY = "ExactCheckpoint"
_SHARED, _SUMS, _RANKS = "state_is_step", "sums", "ranks"


def entry_of_ranks(parts: Sequence[bytes]) -> dict[str, Any]:
    """Returns the entry with the packed state of each rank."""
    return {_RANKS: [as_tensor(part) for part in parts]}


def entry_of_step(shared: Mapping[str, Any], sums: Sequence[bytes]) -> dict[str, Any]:
    """Returns the entry of a training run whose state is a function of the step.

    Args:
        shared: The state that all ranks share.
        sums: The packed sums over the epoch of each rank.
    """
    return {_SHARED: as_tensor(pack(dict(shared))), _SUMS: [as_tensor(part) for part in sums]}


def check_saved(checkpoint: Mapping[str, Any], world_size: int, *, state_is_step: bool = False) -> None:
    """Rejects a checkpoint that `world_size` ranks cannot resume bit-identically.

    Args:
        checkpoint: The checkpoint.
        world_size: Number of ranks.
        state_is_step: Whether the module declares that its state is a function of the step, so that a checkpoint
            without an entry has everything.

    Raises:
        InputError: It was not saved by ExactCheckpoint, or has the states of another number of ranks.
    """
    if KEY not in checkpoint and state_is_step:
        return
    require(
        KEY in checkpoint,
        "The checkpoint was not saved by ExactCheckpoint, so that a bit-identical resume is impossible. Resume "
        "from `ExactCheckpoint.last`, or remove ExactCheckpoint.",
    )
    entry = checkpoint[KEY] if isinstance(checkpoint[KEY], Mapping) else {}
    if _SHARED in entry and isinstance(entry.get(_SUMS), list):
        return
    ranks = entry.get(_RANKS)
    require(isinstance(ranks, list), "The part of ExactCheckpoint in the checkpoint is damaged.")
    count = len(ranks or ())
    require(
        count == world_size,
        f"The checkpoint was saved by {count} rank{'s' * (count != 1)}, and cannot be resumed bit-identically by "
        f"{world_size}: use {count} device{'s' * (count != 1)}. Only a training run whose state is a function of the "
        "step (see state_is_step in docs/plugins.md) resumes on another number of ranks.",
    )


def read_entry(checkpoint: Mapping[str, Any], trainer: Trainer, *, state_is_step: bool) -> dict[str, Any]:
    """Returns the state for this rank, with the position of its loaders as `loaders`.

    `between_batches` is whether all of the last batch was done when it was saved. Of a training run whose state is a
    function of the step, the position is only whether it has ended. `trainer` is missing if another program has written
    the checkpoint.

    Args:
        checkpoint: The checkpoint.
        trainer: The Trainer that resumes.
        state_is_step: As of `check_saved`.

    Raises:
        InputError: The checkpoint cannot be resumed.
    """
    check_saved(checkpoint, trainer.world_size, state_is_step=state_is_step)
    device, rank = trainer.strategy.root_device, trainer.global_rank
    if KEY not in checkpoint:
        return {"loaders": {"ended": False}, "between_batches": _is_between_batches(checkpoint)}
    entry = checkpoint[KEY]
    if _SHARED not in entry:
        return {**unpack(as_bytes(entry[_RANKS][rank]), device), "between_batches": True}
    require(
        state_is_step,
        f"The checkpoint has no state of each rank, because the module that saved it has state_is_step = True, but "
        f"{type(trainer.lightning_module).__name__} has not: set it.",
    )
    state: dict[str, Any] = unpack(as_bytes(entry[_SHARED]), device)
    sums = [unpack(as_bytes(part), device) for part in entry[_SUMS]]
    if len(sums) == trainer.world_size:
        own = sums[rank]
    else:
        own = {
            "results": merge_results([each["results"] for each in sums], is_first=rank == 0),
            "metrics": merge_metrics([each["metrics"] for each in sums], is_first=rank == 0),
        }
    state["trainer"]["results"] = own["results"]
    return {**state, "metrics": own["metrics"], "between_batches": True}


def has_ended(checkpoint: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint is the end of a training run whose state is a function of the step."""
    entry = checkpoint.get(KEY, {})
    return _SHARED in entry and bool(unpack(as_bytes(entry[_SHARED]), torch.device("cpu"))["loaders"]["ended"])


def _is_between_batches(checkpoint: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint was saved when everything of the last batch was done, and the epoch goes on."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = fit.get("epoch_loop.batch_progress", {"current": {}})
    current = progress["current"]
    return bool(current.get("ready") == current.get("completed") and not progress.get("is_last_batch"))
