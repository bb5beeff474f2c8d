"""The model and its data: the classes that `config.yaml` names."""

from my_project.data import LitData
from my_project.module import LitModel

__all__ = ["LitData", "LitModel"]
