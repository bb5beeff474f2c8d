"""The experiment: what is trained, on which data, and how. One frozen dataclass per section."""

from lit_mnist.experiment.data import DataSettings
from lit_mnist.experiment.experiment import Command, Experiment, flatten
from lit_mnist.experiment.model import ModelSettings, Net
from lit_mnist.experiment.run import RunSettings
from lit_mnist.experiment.trainer import Precision, TrainerSettings

__all__ = [
    "Command",
    "DataSettings",
    "Experiment",
    "ModelSettings",
    "Net",
    "Precision",
    "RunSettings",
    "TrainerSettings",
    "flatten",
]
