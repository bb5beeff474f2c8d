"""Detects a change in the undocumented parts of torchvision that the data sets use."""

from __future__ import annotations

import re

import pytest

from lit_mnist.data.torch_internals import CLASSES, digit_archives


@pytest.mark.parametrize("name", CLASSES)
def test_torchvision_states_the_archives_of_each_data_set(name: str) -> None:
    archives = digit_archives(name, "letters")
    names = list(archives)
    assert len(names) == 4
    assert ["images-idx3" in name for name in names] == [True, False, True, False]
    assert ["train" in name for name in names] == [True, True, False, False]
    assert len(set(archives.values())) == (1 if name == "emnist" else 4)
    for archive in archives.values():
        assert re.fullmatch(r"[\w.-]+\.(gz|zip)", archive.name)
        assert all(re.fullmatch(rf"https?://.+/{archive.name}", address) for address in archive.addresses)
        assert re.fullmatch(r"[0-9a-f]{32}", archive.md5)
