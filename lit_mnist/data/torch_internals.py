"""The undocumented parts of torchvision that the data sets use: their addresses and MD5 sums."""

from __future__ import annotations

from pathlib import PurePosixPath

from lit_mnist.data.download import Archive

CLASSES = {"fashion_mnist": "FashionMNIST", "kmnist": "KMNIST", "qmnist": "QMNIST", "emnist": "EMNIST"}


def digit_archives(name: str, emnist_split: str) -> dict[str, Archive]:
    """Returns the archive of each decoded file: training images and labels, then test images and labels."""
    from torchvision import datasets

    published = getattr(datasets, CLASSES[name])
    if name == "emnist":
        archive = Archive(PurePosixPath(published.url).name, (published.url,), published.md5)
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return {f"emnist-{emnist_split}-{part}-{kind}": archive for part in ("train", "test") for kind in kinds}
    if name == "qmnist":
        resources, mirrors = [*published.resources["train"], *published.resources["test"]], [""]
    else:
        resources, mirrors = published.resources, published.mirrors
    archives = [
        Archive(PurePosixPath(file).name, tuple(f"{mirror}{file}" for mirror in mirrors), md5)
        for file, md5 in resources
    ]
    return {PurePosixPath(archive.name).stem: archive for archive in archives}
