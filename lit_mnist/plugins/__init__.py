"""The guarantees of the project as parts for any Lightning code; see docs/plugins.md.

The names below are imported at their first use: importing the package imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_mnist.plugins.accumulation import ExactAccumulation
    from lit_mnist.plugins.batch_norm import PortableSyncBatchNorm
    from lit_mnist.plugins.buffers import SynchronizedBuffers
    from lit_mnist.plugins.channels_last import ChannelsLast
    from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
    from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
    from lit_mnist.plugins.exact_metrics import ExactMetric, exact_metric
    from lit_mnist.plugins.failure_report import FailureReport
    from lit_mnist.plugins.keep_memory import KeepMemory
    from lit_mnist.plugins.precision import Float16OnCPU
    from lit_mnist.plugins.sampler import ExactDistributedSampler
    from lit_mnist.plugins.skipped_steps import SkippedStepSchedule
    from lit_mnist.plugins.verified_loading import VerifiedLoading

__all__ = [
    "ChannelsLast",
    "ExactAccumulation",
    "ExactCheckpoint",
    "ExactDistributedSampler",
    "ExactMetric",
    "FailureReport",
    "Float16OnCPU",
    "KeepMemory",
    "PortableSyncBatchNorm",
    "SkippedStepSchedule",
    "SynchronizedBuffers",
    "VerifiedCheckpointIO",
    "VerifiedLoading",
    "exact_metric",
]

_HOMES = {
    "ChannelsLast": "channels_last",
    "ExactAccumulation": "accumulation",
    "ExactCheckpoint": "exact_checkpoint",
    "ExactDistributedSampler": "sampler",
    "ExactMetric": "exact_metrics",
    "FailureReport": "failure_report",
    "Float16OnCPU": "precision",
    "KeepMemory": "keep_memory",
    "PortableSyncBatchNorm": "batch_norm",
    "SkippedStepSchedule": "skipped_steps",
    "SynchronizedBuffers": "buffers",
    "VerifiedCheckpointIO": "checkpoint_io",
    "VerifiedLoading": "verified_loading",
    "exact_metric": "exact_metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
