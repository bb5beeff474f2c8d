"""The initial weights of a training, from a file.

They are read once before the ranks start, and checked against the names and shapes of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lit_mnist.checkpoint.format import SECTION, find_weights, read_checkpoint
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net

_NET = "net."


def read_weights(
    settings: ModelSettings, *, num_classes: int, report: Callable[[str], None] = print
) -> dict[str, torch.Tensor] | None:
    """Returns the state dict that `model.weights` selects, or None for random weights.

    Args:
        settings: The weights and the network.
        num_classes: Number of classes.
        report: Receives a message if a run folder has no best checkpoint.

    Raises:
        InputError: The weights cannot be read, or belong to another network.
    """
    if settings.weights == "none":
        return None
    path = Path(settings.weights).expanduser()
    if path.is_dir():
        path = find_weights(path, report)
    # Tensors on the meta device have no data.
    with torch.device("meta"):
        wanted = build_net(settings, num_classes=num_classes, seed=0).state_dict()
    found = dict(_read(path))
    missing, unknown = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    reasons = [f"lacks {missing[0]}"] if missing else []
    reasons += [f"has {str(unknown[0])[:100]}, which no such network has"] if unknown else []
    if reasons:
        raise InputError(f"model.weights {path} is not of a {settings.net}: it {', and '.join(reasons)}.")
    for name, tensor in found.items():
        _check(path, name, tensor, wanted[name], f"{settings.net} with {num_classes} classes")
    return found


def _check(path: Path, name: str, tensor: object, wanted: torch.Tensor, what: str) -> None:
    shape = tuple(getattr(tensor, "shape", ()))
    if not isinstance(tensor, torch.Tensor) or shape != tuple(wanted.shape):
        raise InputError(
            f"model.weights {path} has {name} with the shape {shape}, but a {what} has {tuple(wanted.shape)}."
        )
    if tensor.is_floating_point() != wanted.is_floating_point():
        raise InputError(f"model.weights {path} has {name} as {tensor.dtype}, but a {what} has {wanted.dtype}.")
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"model.weights {path} has values in {name} that are infinite or NaN.")


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        raise InputError(f"model.weights: there is no file {path}: use none, a run folder, or a file of weights.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = read_checkpoint(path, hashed=False)
    except InputError as error:
        raise InputError(
            f"model.weights: {error} A file of weights is what torch.save(net.state_dict(), FILE) writes, of "
            "torch 1.6 or newer."
        ) from error
    if SECTION not in content:
        return content
    return {str(name).removeprefix(_NET): tensor for name, tensor in content["state_dict"].items()}


def _read_safetensors(path: Path) -> Mapping[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"model.weights {path} is damaged or not a file of weights: {error}.") from error
