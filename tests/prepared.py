"""What a process has ready before a test forks it: imports, templates, versions, and the MNIST of the package.

A training run that imports TensorBoard, compiles the templates, and decodes and verifies the files again takes three
fifths longer. `tests/data/` tests that each load verifies the files.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from lit_mnist.data import dataset
from lit_mnist.data.digits import mnist
from lit_mnist.profiling.timing import commit, versions

_FILES, _load = mnist.EMBEDDED, mnist.load_mnist
# What a run imports when it is needed.
_LATER = (
    "lit_mnist.cli.run",
    "lit_mnist.cli.launch",
    "lit_mnist.cli.experiment_target",
    "lit_mnist.cli.user_target",
    "lit_mnist.engines.lightning",
    "lit_mnist.engines.rank_work",
    "lit_mnist.report.run",
    "torch.utils.tensorboard",
)


@cache
def prepare() -> Any:
    """Prepares this process, whose forks inherit it; returns what `load_mnist` returns of the package's files."""
    for name in _LATER:
        importlib.import_module(name)
    from lit_mnist.report.html import _environment

    for package in ("lit_mnist.report", "lit_mnist.comparison"):
        environment = _environment(package)
        for name in environment.list_templates(extensions=["jinja"]):
            environment.get_template(name)
    # Each run reads them once: the versions from the packages' metadata, and the commit from git.
    versions()
    commit()
    return _load(None)


def use_prepared() -> None:
    """Lets this process, a fork, use the data. Files in a folder, and others in place of the package's, are read."""
    dataset.load_mnist = _load_or_keep


def _load_or_keep(root: Path | None) -> Any:
    return prepare() if root is None and mnist.EMBEDDED == _FILES else _load(root)
