"""Distributed training that can be trusted, on the smallest real example there is.

The public names are imported lazily: importing the package imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_mnist.cli.api import compare, train
    from lit_mnist.datamodule import MNISTDataModule
    from lit_mnist.experiment.registry import register_dataset, register_network
    from lit_mnist.models.layers import SeededDropout
    from lit_mnist.module import LitClassifier
    from lit_mnist.predict.trained import load
    from lit_mnist.trainer import LitTrainer

__version__ = "0.1.0"
__all__ = [
    "LitClassifier",
    "LitTrainer",
    "MNISTDataModule",
    "SeededDropout",
    "compare",
    "load",
    "register_dataset",
    "register_network",
    "train",
]

_MODULES = {
    "LitClassifier": "module",
    "LitTrainer": "trainer",
    "MNISTDataModule": "datamodule",
    "SeededDropout": "models.layers",
    "compare": "cli.api",
    "load": "predict.trained",
    "register_dataset": "experiment.registry",
    "register_network": "experiment.registry",
    "train": "cli.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
