"""The experiment, which all engines share.

The sections `model`, `data` and `trainer` and the seed define what is computed. The section `run` does not change it,
except for `run.threads`. The defaults of the dataclasses are the default experiment.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_mnist.errors import require
from lit_mnist.experiment.data import DataSettings
from lit_mnist.experiment.model import ModelSettings
from lit_mnist.run.settings import RunSettings
from lit_mnist.run.trainer_settings import TrainerSettings


@dataclass(frozen=True)
class Experiment:
    """Everything that determines the numbers of a run, and the section `run`."""

    seed_everything: int = 42
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        seed = self.seed_everything
        require(0 <= seed < 2**32, f"seed_everything must be from 0 to 4294967295, but is {seed}.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the experiment as nested plain values, section by section, as in a configuration file."""
        return asdict(self)

    def replace(self, section: str, **changes: Any) -> Experiment:
        """Returns a copy with some settings of one section changed."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **changes)})
