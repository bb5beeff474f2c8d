"""The initial weights of a training, from torchvision or from a file.

They are read once before the ranks start, and checked against the names and shapes of the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from lit_mnist.checkpoint.format import SECTION, find_weights, read_checkpoint
from lit_mnist.data.download import download, exclusive
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net

# Parts of torchvision's networks that this project's networks do not have.
_UNUSED = ("aux_classifier.",)
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
        InputError: The weights cannot be read or downloaded, or belong to another network.
    """
    if settings.weights == "none":
        return None
    if settings.weights == "backbone":
        return _backbone(settings)
    path = Path(settings.weights).expanduser()
    if path.is_dir():
        path = find_weights(path, report)
    # Tensors on the meta device have no data.
    with torch.device("meta"):
        wanted = build_net(settings, num_classes=num_classes, seed=0).state_dict()
    found = {name: tensor for name, tensor in _read(path).items() if not str(name).startswith(_UNUSED)}
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
        raise InputError(
            f"model.weights: there is no file {path}: use none, backbone, a run folder, or a file of weights."
        )
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


def _backbone(settings: ModelSettings) -> dict[str, torch.Tensor]:
    """Returns torchvision's weights of a backbone, which are downloaded once into torch's cache."""
    from torchvision.models import get_model_weights

    url = str(get_model_weights(settings.net.removeprefix("deeplabv3_"))["IMAGENET1K_V1"].url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.parent, "download weights into"):
            if not path.exists():
                partial = path.with_suffix(".partial")
                download(url, partial)
                partial.replace(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            f"model.weights backbone: {path.name} could not be downloaded ({error}). Check the network, or put the "
            f"file of {url} into {path.parent}."
        ) from error
    # The file name ends with the first digits of the digest.
    if not digest.startswith(path.stem.rpartition("-")[2]):
        raise InputError(f"model.weights backbone: {path} is damaged (its SHA-256 is {digest}): remove it.")
    return backbone_weights(settings, torch.load(path, map_location="cpu", weights_only=True))


def backbone_weights(settings: ModelSettings, published: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames torchvision's weights of a backbone as in the network.

    Args:
        settings: The network.
        published: The state dict of torchvision's classifier; its last layers are not used.
    """
    with torch.device("meta"):
        wanted = build_net(replace(settings, weights="none"), num_classes=1, seed=0).state_dict()
    renamed = {f"backbone.{name.removeprefix('features.')}": tensor for name, tensor in published.items()}
    return {name: renamed[name] for name in wanted if name.startswith("backbone.")}
