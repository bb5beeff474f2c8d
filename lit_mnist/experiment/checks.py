"""Checks that the settings of an experiment fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import DATASETS, NETWORKS

if TYPE_CHECKING:
    from lit_mnist.experiment.experiment import Experiment


def check_experiment(experiment: Experiment) -> None:
    """Checks that the settings of an experiment fit each other.

    Raises:
        InputError: Two settings contradict each other, or one has no effect on a registered network or data set.
    """
    model, data = experiment.model, experiment.data
    if model.lr_scale != "none" and data.batch_per != "rank":
        raise InputError(
            f"model.lr_scale {model.lr_scale} requires data.batch_per rank, which multiplies the batch by the number "
            "of ranks: set both, or remove it."
        )
    net, dataset = NETWORKS.get(model.net), DATASETS.get(data.name)
    if net and model.compile:
        raise InputError(f"model.compile does not apply to model.net {model.net}: remove it.")
    if net and model.views != 1 and "views" not in net.arguments:
        raise InputError(
            f"model.views {model.views} does not apply to model.net {model.net}: remove it, or give "
            f"{net.path} an argument views."
        )
    if dataset and data.root is not None and "root" not in dataset.arguments:
        raise InputError(
            f"data.root {data.root} does not apply to data.name {data.name}: remove it, or give {dataset.path} an "
            "argument root."
        )
