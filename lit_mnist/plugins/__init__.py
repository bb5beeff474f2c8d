"""The guarantees of the project as parts for any Lightning Trainer; each has an example in its docstring."""

from lit_mnist.plugins.accumulation import ExactAccumulation
from lit_mnist.plugins.channels_last import ChannelsLast
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.evaluation import ExactDDPStrategy, ExactEvaluation, PredictionWriter
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint, ResumableDataLoader
from lit_mnist.plugins.failure_report import FailureReport
from lit_mnist.plugins.finite import StopOnNonFinite
from lit_mnist.plugins.precision import Float16OnCPU
from lit_mnist.plugins.sampler import ExactDistributedSampler
from lit_mnist.plugins.skipped_steps import SkippedStepSchedule
from lit_mnist.plugins.stop import StopTogether
from lit_mnist.plugins.sync_batch_norm import PortableSyncBatchNorm

__all__ = [
    "ChannelsLast",
    "ExactAccumulation",
    "ExactCheckpoint",
    "ExactDDPStrategy",
    "ExactDistributedSampler",
    "ExactEvaluation",
    "FailureReport",
    "Float16OnCPU",
    "PortableSyncBatchNorm",
    "PredictionWriter",
    "ResumableDataLoader",
    "SkippedStepSchedule",
    "StopOnNonFinite",
    "StopTogether",
    "VerifiedCheckpointIO",
]
