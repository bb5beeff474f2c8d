"""Weights that a training begins with, instead of random ones: torchvision's of a backbone, or those of a file.

They are read once, before a rank starts, and checked against the network's names and shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from lit_mnist.checkpoint.format import SECTION, find_weights, read_checkpoint
from lit_mnist.checkpoint.safety import UnsafeError, check_archive
from lit_mnist.data.download import download, exclusive
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net

# What torchvision's networks have beside what is used of them.
_LEFT_OUT = ("aux_classifier.",)
_NET = "net."


def read_weights(
    settings: ModelSettings, *, num_classes: int, report: Callable[[str], None] = print
) -> dict[str, torch.Tensor] | None:
    """Returns the weights that `model.weights` names, by the network's own names; None for random ones.

    Args:
        settings: Which weights, and of which network.
        num_classes: Number of classes.
        report: Is told where the weights of a run folder are not its best.

    Raises:
        InputError: They cannot be read or fetched, or are those of another network.
    """
    if settings.weights == "none":
        return None
    if settings.weights == "backbone":
        return _backbone(settings)
    path = Path(settings.weights).expanduser()
    if path.is_dir():
        path = find_weights(path, report)
    # Shapes alone: on this device nothing is computed or kept.
    with torch.device("meta"):
        wanted = build_net(settings, num_classes=num_classes, seed=0).state_dict()
    found = {name: tensor for name, tensor in _read(path).items() if not str(name).startswith(_LEFT_OUT)}
    lacks, odd = ([name for name in one if name not in other] for one, other in ((wanted, found), (found, wanted)))
    if lacks or odd:
        told = [f"lacks {lacks[0]}"] if lacks else []
        told += [f"has {str(odd[0])[:100]}, which no such network has"] if odd else []
        raise InputError(f"model.weights {path} is not of a {settings.net}: it {', and '.join(told)}.")
    for name, tensor in found.items():
        _check(path, name, tensor, wanted[name], f"{settings.net} with {num_classes} classes")
    return found


def _check(path: Path, name: str, tensor: object, wanted: torch.Tensor, what: str) -> None:
    """Refuses what cannot take the place of a tensor of the network, or would spoil every step from the first."""
    shape = tuple(getattr(tensor, "shape", ()))
    if not isinstance(tensor, torch.Tensor) or shape != tuple(wanted.shape):
        raise InputError(
            f"model.weights {path} has {name} with the shape {shape}, but a {what} has {tuple(wanted.shape)}."
        )
    if tensor.is_floating_point() != wanted.is_floating_point():
        raise InputError(f"model.weights {path} has {name} as {tensor.dtype}, but a {what} has {wanted.dtype}.")
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"model.weights {path} has values in {name} that are infinite or not numbers.")


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    """Returns a file's tensors by their names, and executes nothing that it holds."""
    if not path.is_file():
        raise InputError(
            f"model.weights: there is no file {path}: say none, backbone, a run folder, or a file of weights."
        )
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        with path.open("rb") as file:
            check_archive(file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except UnsafeError as error:
        raise InputError(
            f"model.weights {path} is no file of weights: {error}. One is what torch.save(net.state_dict(), FILE) "
            "writes, of torch 1.6 or newer."
        ) from error
    except PermissionError as error:
        raise InputError(f"model.weights {path} cannot be read: {error.strerror}.") from error
    except Exception as error:
        raise InputError(f"model.weights {path} is damaged or no file of weights ({type(error).__name__}).") from error
    if isinstance(content, dict) and SECTION in content:
        # A checkpoint is verified by its own hash, too.
        weights = read_checkpoint(path)["state_dict"]
        return {str(name).removeprefix(_NET): tensor for name, tensor in weights.items()}
    if not isinstance(content, dict):
        raise InputError(f"model.weights {path} is no file of weights: it holds a {type(content).__name__}.")
    return content


def _read_safetensors(path: Path) -> Mapping[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"model.weights {path} is damaged or no file of weights: {error}.") from error


def _backbone(settings: ModelSettings) -> dict[str, torch.Tensor]:
    """Returns torchvision's weights of a backbone, fetched once into torch's cache."""
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
            f"model.weights backbone: {path.name} could not be fetched ({error}). Check the network, or put what {url} "
            f"gives into {path.parent}."
        ) from error
    # The name holds the digest's beginning.
    if not digest.startswith(path.stem.rpartition("-")[2]):
        raise InputError(f"model.weights backbone: {path} is damaged (its SHA-256 is {digest}): remove it.")
    return backbone_weights(settings, torch.load(path, map_location="cpu", weights_only=True))


def backbone_weights(settings: ModelSettings, published: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights of a backbone by a network's own names.

    Args:
        settings: Which network.
        published: The weights of torchvision's classifier, by its names; its last layers are left out.
    """
    with torch.device("meta"):
        wanted = build_net(replace(settings, weights="none"), num_classes=1, seed=0).state_dict()
    renamed = {f"backbone.{name.removeprefix('features.')}": tensor for name, tensor in published.items()}
    return {name: renamed[name] for name in wanted if name.startswith("backbone.")}
