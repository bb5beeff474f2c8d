"""The experiment: what is trained, on which data, and how.

Each section of a configuration file is a frozen dataclass: `model.py` and `data.py` here, and of the run system, the
options of Lightning's Trainer (`run/trainer_settings.py`) and the section `run` (`run/settings.py`). The names below
are imported at their first use, so that a network needs nothing of the data.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_mnist.experiment.data import DataSettings
    from lit_mnist.experiment.experiment import Experiment
    from lit_mnist.experiment.model import ModelSettings

__all__ = ["DataSettings", "Experiment", "ModelSettings"]

_HOMES = {"DataSettings": "data", "Experiment": "experiment", "ModelSettings": "model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
