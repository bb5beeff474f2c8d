"""The experiment: what is trained, on which data, and how.

Each section of a configuration file is a frozen dataclass: `model.py` and `data.py` here, and of the run system, the
options of Lightning's Trainer (`run/trainer_settings.py`) and the section `run` (`run/settings.py`).
"""

from lit_mnist.checkpoint.config import flatten
from lit_mnist.experiment.data import DataSettings
from lit_mnist.experiment.experiment import Experiment
from lit_mnist.experiment.model import ModelSettings, Net
from lit_mnist.run.settings import Command, RunSettings
from lit_mnist.run.trainer_settings import Precision, TrainerSettings

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
