"""Reads the experiment of a checkpoint, and checks it as strictly as any other input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from lit_mnist.checkpoint.config import flatten
from lit_mnist.checkpoint.format import SECTION
from lit_mnist.distributed.precision import UsedPrecision
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.experiment.checks import check_experiment
from lit_mnist.experiment.schema import convert, make_experiment, options, without_removed
from lit_mnist.models.build import build_net

# Text settings, except those that are paths.
_WORD = re.compile(r"[\w.:=,+-]*")
_PATHS = ("data.root", "model.weights", "run.dir", "run.resume")
_KINDS = {
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
_SECTION_KINDS = {
    "data_sha256": str,
    "num_classes": int,
    "batch_size": int,
    "total_steps": int,
}
_MOST_CLASSES = 1000
# Maximum number of characters of a setting: the longest path on Linux.
_LONGEST_SETTING = 4096


def read_experiment(path: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the experiment of a verified checkpoint as nested plain values.

    Args:
        path: The file, for messages.
        checkpoint: The content of the file.

    Raises:
        InputError: An entry is missing, of another type, or out of range.
    """
    section = checkpoint[SECTION]
    model = section["config"].get("model")
    if isinstance(model, dict) and (name := model.get("class_path")):
        raise InputError(
            f"{path} is of a run of the module {name}, but this needs a run of a registered network. In Python, load "
            f"it with {str(name).rpartition('.')[2]}.load_from_checkpoint."
        )
    for values, kinds in ((checkpoint, _KINDS), (section, _SECTION_KINDS)):
        for name, kind in kinds.items():
            if type(values.get(name)) is not kind:
                raise InputError(f"{path} is not a checkpoint of a run: its {name} is missing or of another type.")
    experiment = _parse_experiment(section["config"], path)
    _check_weights(path, checkpoint["state_dict"], section["num_classes"], experiment)
    if section["precision"] not in get_args(UsedPrecision):
        raise InputError(f"{path} is not a checkpoint of a run: its precision is invalid.")
    return experiment


def read_trainer_experiment(path: Path, checkpoint: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Returns the number of classes, and the experiment with its model only, of a checkpoint of a stock `Trainer`.

    Args:
        path: The file, for messages.
        checkpoint: The content of the file.

    Raises:
        InputError: The file is not a checkpoint of a `LitClassifier`.
    """
    found, weights = checkpoint.get("hyper_parameters"), checkpoint["state_dict"]
    if not isinstance(found, dict):
        raise InputError(
            f"{path} is not a checkpoint of this project's networks: it has no {SECTION} section. The weights of your "
            "own LightningModule are loaded by its load_from_checkpoint."
        )
    model = dict(found)
    num_classes, seed = model.pop("num_classes", None), model.pop("seed", None)
    if not isinstance(num_classes, int) or not isinstance(seed, int):
        raise InputError(f"{path} is not a checkpoint of a LitClassifier: it contains no num_classes and seed.")
    known = _parse_experiment({"model": model, "seed_everything": seed}, path)
    _check_weights(path, weights, num_classes, known)
    exact = any(tensor.dtype == torch.float64 for tensor in weights.values())
    trainer = {"precision": "64-true" if exact else "auto"}
    return num_classes, {"seed_everything": seed, "model": known["model"], "trainer": trainer}


def _check_weights(path: Path, weights: dict[str, Any], num_classes: int, experiment: dict[str, Any]) -> None:
    if not 0 < num_classes <= _MOST_CLASSES:
        raise InputError(f"{path} is for {num_classes} classes: no data set here has as many.")
    # Tensors on the meta device have no data.
    with torch.device("meta"):
        net = build_net(ModelSettings(**{**experiment["model"], "compile": False}), num_classes=num_classes, seed=0)
    wanted = {f"net.{name}": tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    found = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in weights.items()}
    if wanted != found or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise InputError(f"{path} does not hold the weights of a {experiment['model']['net']}.")


def _parse_experiment(values: object, source: Path) -> dict[str, Any]:
    if not isinstance(values, Mapping) or not values:
        raise InputError(f"{source} has no experiment.")
    try:
        flat = without_removed(dict(flatten(values)))
    except TypeError as error:
        raise InputError(f"{source} has an experiment with a key that is not text.") from error
    unknown = [key for key in flat if key not in options()]
    texts = {key: value for key, value in flat.items() if key not in _PATHS and isinstance(value, str)}
    unknown += [key for key, value in texts.items() if not _WORD.fullmatch(value)]
    unknown += [key for key, value in flat.items() if len(str(value)) > _LONGEST_SETTING]
    if unknown:
        raise InputError(f"{source} holds an experiment that this version does not know ({', '.join(unknown)[:200]}).")
    try:
        experiment = make_experiment(convert(flat))
        check_experiment(experiment)
    except InputError as error:
        raise InputError(f"{source} holds an experiment that this version does not accept: {error}") from error
    return experiment.to_dict()
