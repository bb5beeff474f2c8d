"""Photographs of digits are read like the originals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from digit_images import Array, crop_to_ink, load_test_digits, load_train_digits
from PIL import Image
from torch import nn

from lit_mnist.predict.user_images import read_digits


@pytest.fixture(scope="session")
def digits() -> torch.Tensor:
    return load_test_digits()


Predict = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session")
def predict() -> Predict:
    """Returns a function from images to their classes."""
    images, labels = load_train_digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inner, outer in ((1, 16), (16, 32)):
            layers += [nn.Conv2d(inner, outer, 5, padding=2), nn.MaxPool2d(2), nn.BatchNorm2d(outer), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))
        order = torch.randperm(len(images))[: 300 * 50].reshape(300, 50)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(order))
    for batch in order:
        optimizer.zero_grad()
        F.cross_entropy(net(images[batch, None] / 255), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    net.eval()

    @torch.inference_mode()
    def classes(images: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = net(images[:, None] / 255).argmax(dim=1)
        return predicted

    return classes


def photograph(shape: Array, random: np.random.Generator, path: Path, *, light: bool) -> None:
    """A JPEG or PNG of random size: random place, size, ink and paper, light from one side, noise."""
    width, height = random.integers(28, 401, 2)
    shape = crop_to_ink(torch.from_numpy(shape))
    longest = max(16, random.uniform(0.15, 1) * min(width, height))
    rows, columns = (max(1, round(length * longest / max(shape.shape))) for length in shape.shape)
    ink = np.asarray(Image.fromarray(shape).resize((columns, rows), Image.Resampling.BICUBIC)) / 255
    page = np.zeros((height, width))
    top, left = random.integers(0, height - rows + 1), random.integers(0, width - columns + 1)
    page[top : top + rows, left : left + columns] = ink
    dark = random.integers(0, 256 - 80)
    bright = random.integers(dark + 80, 256)
    grey = np.where(light, dark + (bright - dark) * page, bright - (bright - dark) * page)
    slope = random.uniform(-15, 15, 2)
    grey += slope[0] * np.linspace(-1, 1, width) + slope[1] * np.linspace(-1, 1, height)[:, None]
    grey += random.uniform(0, 6) * random.standard_normal(grey.shape, np.float32)
    Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(path, quality=int(random.integers(60, 96)))


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1,000 test digits, and the digits read from photographs of them."""
    random, folder = np.random.default_rng(20), tmp_path_factory.mktemp("photographs")
    chosen = digits[torch.from_numpy(random.permutation(len(digits))[:1000])]
    paths = [folder / f"{index}.jpg" for index in range(1000)]
    for index, (digit, path) in enumerate(zip(chosen, paths, strict=True)):
        photograph(digit.numpy(), random, path, light=index % 2 == 0)
    return chosen, read_digits(paths)


def test_photographs_are_classified_like_the_originals(
    photographs: tuple[torch.Tensor, torch.Tensor], predict: Predict
) -> None:
    chosen, read = photographs
    same = predict(read) == predict(chosen)
    assert same.float().mean() >= 0.99
    assert same[::2].float().mean() >= 0.985, f"light on dark: {same[::2].float().mean():.3f}"
    assert same[1::2].float().mean() >= 0.985, f"dark on light: {same[1::2].float().mean():.3f}"
