"""Images of digits for the tests, read from the files in the package."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import lit_mnist

Array = npt.NDArray[Any]
DATA = Path(lit_mnist.__file__).parent / "data" / "digits" / "files"


def read_raw(name: str, offset: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(gzip.decompress((DATA / name).read_bytes()), np.uint8, offset=offset).copy())


@cache
def load_train_digits() -> tuple[torch.Tensor, torch.Tensor]:
    images = read_raw("train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    return images, read_raw("train-labels-idx1-ubyte.gz", 8).long()


@cache
def load_test_digits() -> torch.Tensor:
    return read_raw("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)


def crop_to_ink(digit: torch.Tensor) -> Array:
    ink = digit.numpy()
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
