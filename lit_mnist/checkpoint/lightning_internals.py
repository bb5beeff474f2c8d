"""The undocumented content of a Lightning checkpoint: the progress of its loops.

A change in Lightning is detected by `test_an_engine_goes_on_where_another_stopped` in tests/engines/test_engines.py and
by tests/faults/test_exact.py.
"""

from __future__ import annotations

from typing import Any


def lightning_loops(
    step: int, *, epoch: int, batch: int, batches_per_epoch: int, steps_per_epoch: int
) -> dict[str, Any]:
    """Returns the state dict of Lightning's loops.

    Args:
        step: Optimizer steps so far.
        epoch: Complete epochs so far.
        batch: Micro-batches so far in the current epoch.
        batches_per_epoch: Micro-batches of an epoch.
        steps_per_epoch: Optimizer steps of an epoch.
    """
    done, begun = epoch, epoch + (batch > 0)
    batches, steps = epoch * batches_per_epoch + batch, step % steps_per_epoch
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {**_progress(batches, batch), "is_last_batch": False},
        "epoch_loop.scheduler_progress": _counts(step, steps, "ready", "completed"),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _counts(step, steps, "ready", "completed"),
                "zero_grad": _counts(step, steps, "ready", "completed", "started"),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _counts(0, 0, "ready", "completed"),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**_progress(0, 0), "is_last_batch": False},
        "epoch_progress": {
            scope: {"ready": begun, "completed": done, "started": begun, "processed": done}
            for scope in ("total", "current")
        },
    }
    idle = {"state_dict": {}, "batch_progress": {**_progress(0, 0), "is_last_batch": False}}
    predict = {"state_dict": {}, "batch_progress": _progress(0, 0)}
    return {"fit_loop": fit, "validate_loop": idle, "test_loop": idle, "predict_loop": predict}


def _progress(total: int, current: int) -> dict[str, dict[str, int]]:
    return _counts(total, current, "ready", "completed", "started", "processed")


def _counts(total: int, current: int, *names: str) -> dict[str, dict[str, int]]:
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}
