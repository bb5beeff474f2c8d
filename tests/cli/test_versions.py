"""A library of another version, a missing one and another platform are rejected with one message."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from conftest import ROOT

from lit_mnist.cli.versions import check_versions
from lit_mnist.errors import InputError

REQUIRED = {
    "lit_mnist": [
        "torch<2.16,>=2.11",
        "torchvision<0.30,>=0.26",
        "lightning<2.7,>=2.6.6",
        'onnx>=1; extra == "export"',
    ],
    "torchvision": ["numpy", "torch==2.11.0"],
}
INSTALLED = {"torch": "2.11.0+cu130", "torchvision": "0.26.0", "lightning": "2.6.6"}


def version_of(installed: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return version


def test_the_supported_versions_are_accepted() -> None:
    check_versions(REQUIRED.get, version_of(INSTALLED), "linux")
    check_versions()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.10.0"}, "lit_mnist needs torch<2.16,>=2.11, but torch 2.10.0 is installed: pip install"),
        ({"torch": "2.16.0"}, "torch 2.16.0 is installed"),
        ({"torch": "2.12.0"}, "torchvision needs torch==2.11.0, but torch 2.12.0 is installed"),
        ({"lightning": "2.6.3"}, 'lightning 2.6.3 is installed: pip install "lightning<2.7,>=2.6.6"'),
        ({"lightning": None}, "which is not installed"),
    ],
)
def test_another_version_is_rejected_with_what_to_do(change: dict[str, str | None], told: str) -> None:
    installed = {name: version for name, version in (INSTALLED | change).items() if version}
    with pytest.raises(InputError) as caught:
        check_versions(REQUIRED.get, version_of(installed), "linux")
    assert told in str(caught.value)


def test_another_platform_is_rejected() -> None:
    with pytest.raises(InputError, match="needs Linux, but this is darwin"):
        check_versions(REQUIRED.get, version_of(INSTALLED), "darwin")


def test_a_checkout_that_is_not_installed_is_accepted() -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    check_versions(requires, version_of({}), "linux")


def test_the_command_prints_one_message_and_no_traceback(tmp_path: Path) -> None:
    """A distribution that comes first on the path stands for an old torch; nothing imports it."""
    info = tmp_path / "torch-2.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--devices", "2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "torch 2.10.0 is installed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {info.name}
