"""The experiment: what is trained, on which data, and how.

Each section of a configuration file is a frozen dataclass in a file of the same name: `model.py`, `data.py`,
`trainer.py` (the options of Lightning's Trainer) and `run.py`.
"""

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
