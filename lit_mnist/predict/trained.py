"""A trained network for use in Python.

>>> from lit_mnist import load
>>> classes, probabilities = load("runs/20260101-120000-convnet").predict(["seven.png"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from lit_mnist.checkpoint.format import find_weights, read_checkpoint
from lit_mnist.data.loader import normalize
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.schema import make_experiment
from lit_mnist.models.build import build_net
from lit_mnist.predict.user_images import read_images
from lit_mnist.training.evaluation import predict_with_probability
from lit_mnist.training.resume import SavedExperiment

Images = torch.Tensor | np.ndarray | Sequence[str | Path | Image.Image]
_NET = "net."


class TrainedNetwork:
    """A trained classifier of digits, in evaluation mode.

    Args:
        net: The network.
        experiment: The experiment that trained it.
        device: The device of the network.
    """

    def __init__(self, net: nn.Module, experiment: Experiment, device: torch.device) -> None:
        self.net = net.to(device).eval()
        self.experiment = experiment
        self.device = device

    @torch.no_grad()
    def predict(self, images: Images, batch_size: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts the classes of digits.

        Args:
            images: uint8 [n, 28, 28], or floating point [n, 28, 28] or [n, 1, 28, 28] from 0 to 1, light ink on
                black; or image files of any size, dark on light or light on dark; or PIL images of 28 x 28 pixels,
                light ink on black.
            batch_size: Number of images in a forward pass.

        Returns:
            Classes, int64 [n], and their probabilities, float32 [n], on the CPU.

        Raises:
            InputError: The images have the wrong shape or range, or a file cannot be read.
        """
        pixels = _to_pixels(images, self.experiment.data.name)
        dtype = next(self.net.parameters()).dtype
        parts = []
        for batch in pixels.split(batch_size):
            logits = self.net(normalize(batch.unsqueeze(1).to(self.device, dtype, copy=True)), None)
            parts.append([part.cpu() for part in predict_with_probability(logits)])
        if not parts:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        classes, probabilities = zip(*parts, strict=True)
        return torch.cat(classes), torch.cat(probabilities)


def load(run_dir_or_ckpt: str | Path, device: str | torch.device = "cpu") -> TrainedNetwork:
    """Loads and verifies the best weights of a run.

    `run_dir` is the folder of a run:

        network = load(run_dir)
        classes, probabilities = network.predict(torch.zeros(2, 28, 28, dtype=torch.uint8))  # int64 [2], float32 [2]

    Args:
        run_dir_or_ckpt: A run folder, of which the best or else the last weights are loaded, or a checkpoint.
        device: The device of the network, such as `cpu` or `cuda:0`.

    Returns:
        The network in evaluation mode, with `predict`.

    Raises:
        InputError: There is no valid checkpoint.
    """
    path = find_weights(Path(run_dir_or_ckpt).expanduser(), print)
    net, experiment, _ = load_net(path)
    return TrainedNetwork(net, experiment, torch.device(device))


def load_net(path: Path) -> tuple[nn.Module, Experiment, int]:
    """Returns the network of a checkpoint with its weights, on the CPU, its experiment, and its number of classes.

    Raises:
        InputError: The checkpoint is damaged, or its network is not registered.
    """
    saved = SavedExperiment.read(path, hashed=False)
    experiment, num_classes = make_experiment({}, saved.to_evaluate()), saved.section["num_classes"]
    net = build_net(experiment.model, num_classes=num_classes, seed=0)
    weights = read_checkpoint(path, hashed=False)["state_dict"]
    state_dict = {name.removeprefix(_NET): tensor for name, tensor in weights.items() if name.startswith(_NET)}
    if experiment.trainer.precision == "64-true":
        net = net.double()
    net.load_state_dict(state_dict)
    return net, experiment, num_classes


def _to_pixels(images: Images, data_name: str) -> torch.Tensor:
    """Converts images to grey values from 0 to 255, uint8 or floating point [n, 28, 28]."""
    if not isinstance(images, torch.Tensor | np.ndarray):
        images = [images] if isinstance(images, str | Path | Image.Image) else list(images)
        if all(isinstance(image, str | Path) for image in images):
            return read_images([Path(str(image)) for image in images], data_name)
        if not all(isinstance(image, Image.Image) for image in images):
            raise InputError("The images must be one tensor or array, or all PIL images, or all paths.")
        pixels = [np.array(image.convert("L")) for image in images if isinstance(image, Image.Image)]
        if any(image.shape != (28, 28) for image in pixels):
            raise InputError("PIL images must have 28 x 28 pixels: save others to files, which are cropped and scaled.")
        images = np.stack(pixels)
    values = torch.as_tensor(images)
    if values.ndim == 4 and values.shape[1] == 1:
        values = values.squeeze(1)
    if values.shape[1:] != (28, 28):
        raise InputError(f"The images must have the shape [n, 28, 28], but have {list(values.shape)}.")
    if values.dtype == torch.uint8:
        return values
    if not values.is_floating_point() or not bool(((values >= 0) & (values <= 1)).all()):
        raise InputError("The images must be uint8, or floating point from 0 to 1.")
    return values * 255
