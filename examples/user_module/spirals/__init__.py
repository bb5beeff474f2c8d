"""A user's package: the classes of `spirals.yaml`."""

from spirals.data import SpiralsData
from spirals.module import SpiralsModule

__all__ = ["SpiralsData", "SpiralsModule"]
