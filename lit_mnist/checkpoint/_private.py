"""The undocumented content of a checkpoint, as written by torch.save and by Lightning.

A change in torch is detected by `test_a_checkpoint_round_trip_is_exact` and
`test_torch_s_own_files_pass_the_safety_check` in tests/checkpoint/test_checkpoint.py. A change in Lightning's loops is
detected by `test_an_engine_goes_on_where_another_stopped` in tests/engines/test_engines.py and by
tests/faults/test_exact.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lit_mnist.experiment.plan import Plan

# The archive's record with the pickled values. A tensor's bytes are in the record `data/KEY`.
VALUES_RECORD = "data.pkl"
TENSOR_RECORD = re.compile(r"data/(\d{1,6})", re.ASCII)
# Records that torch executes or unpickles in other kinds of archives.
_CODE = re.compile(r"code/.*|.*\.(?:pkl|pickle|py|pyc)", re.ASCII | re.IGNORECASE)
_RECORD = re.compile(r"(?:(?!\.{1,2}/)[\w.-]+/)*(?!\.{1,2}$)[\w.-]+", re.ASCII)

# The globals of a pickled tensor.
MAKE_TENSOR = "torch._utils _rebuild_tensor_v2"
MAKE_DICT = "collections OrderedDict"
# An attribute of a network's state_dict: the versions of its layers.
VERSIONS = "_metadata"
# Bytes per element of each type of storage.
ITEM_SIZES = {
    f"torch {name}Storage": getattr(torch, dtype).itemsize
    for name, dtype in (
        ("Float", "float32"),
        ("Double", "float64"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Long", "int64"),
        ("Int", "int32"),
        ("Short", "int16"),
        ("Char", "int8"),
        ("Byte", "uint8"),
        ("Bool", "bool"),
    )
}


def is_harmless_record(name: str) -> bool:
    """Returns whether a record is neither code nor a path out of the archive. Newer releases of torch add records."""
    return name == VALUES_RECORD or (_RECORD.fullmatch(name) is not None and _CODE.fullmatch(name) is None)


def lightning_loops(step: int, plan: Plan) -> dict[str, Any]:
    """Returns the state dict of Lightning's loops after `step` optimizer steps."""
    epoch, batch = plan.position(step)
    done, begun = epoch, epoch + (batch > 0)
    batches, steps = epoch * plan.batches_per_epoch + batch, step % plan.steps_per_epoch
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
