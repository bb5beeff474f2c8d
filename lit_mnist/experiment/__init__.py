"""The experiment: what is trained, on which data, and how.

Each section of a configuration file is a frozen dataclass: `model.py` and `data.py` here, and of the run system, the
options of Lightning's Trainer (`run/trainer_settings.py`) and the section `run` (`run/settings.py`). The names below
are imported at their first use, so that a network needs nothing of the data.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Command": "lit_mnist.run.settings",
    "DataSettings": "lit_mnist.experiment.data",
    "Experiment": "lit_mnist.experiment.experiment",
    "ModelSettings": "lit_mnist.experiment.model",
    "Net": "lit_mnist.experiment.model",
    "Precision": "lit_mnist.run.trainer_settings",
    "RunSettings": "lit_mnist.run.settings",
    "TrainerSettings": "lit_mnist.run.trainer_settings",
    "flatten": "lit_mnist.checkpoint.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
