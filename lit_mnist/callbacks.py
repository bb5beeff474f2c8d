"""The callbacks that LitClassifier brings to every Trainer. Add the ones that your module needs."""

from lit_mnist.plugins.accumulation import ExactAccumulation
from lit_mnist.plugins.buffers import SynchronizedBuffers
from lit_mnist.plugins.channels_last import ChannelsLast
from lit_mnist.plugins.skipped_steps import SkippedStepSchedule

__all__ = ["ChannelsLast", "ExactAccumulation", "SkippedStepSchedule", "SynchronizedBuffers"]
