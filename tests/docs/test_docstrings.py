"""Every public name has a docstring with an example, and each example runs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import DDPStrategy
from processes import run_forked
from torch import nn
from torch.utils.data import DataLoader

import ddp_doctor
import lit_mnist
import lit_mnist.plugins
from ddp_doctor.findings import Report

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
NAMES = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
# Values of other names, and errors.
PLAIN = {"Finding", "Verdict", "CheckState", "State", "Accepted", "Stage", "Comparison", "Batch", "Files"}
WITH_EXAMPLE = [
    name
    for name in NAMES
    if not name.startswith("lit_mnist.errors.") and name.rpartition(".")[2] not in {*PLAIN, "TrainedNetwork", "watch"}
]
# They start processes, or need a run.
SLOW = {"train", "compare", "load", "examine", "examine_command"}
EXAMPLE = re.compile(r":\n\n((?: {4}.*\n|\n)+)")
# The template is short: its examples are on the page.
ON_PAGE = {"lit_mnist.LitClassifier", "lit_mnist.MNISTDataModule"}
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.slow] if name.rpartition(".")[2] in SLOW else [])
    for name in WITH_EXAMPLE
    if name not in ON_PAGE
]
# What keeps an example short: one process on a CPU, two steps, and no files.
SHORT = {"accelerator": "cpu", "devices": 1, "strategy": "auto", "max_epochs": None, "max_steps": 2, "logger": False}


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def example_of(text: str) -> str:
    """Returns the indented code below a line that ends with a colon."""
    return "\n".join(textwrap.dedent(code) for code in EXAMPLE.findall(text + "\n"))


def short_trainer(**options: Any) -> Trainer:
    return Trainer(**{"enable_checkpointing": "callbacks" in options, **options, **SHORT})  # type: ignore[arg-type]


def names_for(code: str) -> dict[str, Any]:
    """Returns what an example does not define."""
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "partial": partial, "DDPStrategy": DDPStrategy}
    names |= {name: getattr(lit_mnist, name) for name in lit_mnist.__all__}
    names |= {name: getattr(lit_mnist.plugins, name) for name in lit_mnist.plugins.__all__}
    names |= {name: getattr(ddp_doctor, name) for name in ddp_doctor.__all__}
    names |= {"examine_command": found("ddp_doctor.pytest.examine_command")}
    names |= {"WatchCallback": found("ddp_doctor.watch.WatchCallback"), "ModelCheckpoint": ModelCheckpoint}
    data = RandomDataset(32, 64)
    names |= {"Trainer": short_trainer, "DataLoader": DataLoader, "module": BoringModel(), "Module": BoringModel}
    names |= {"dataset": data, "val_dataset": data, "train_loader": DataLoader(data), "report": Report("a", 2)}
    if "checkpoint)" in code:
        trainer = Trainer(**{**SHORT, "limit_val_batches": 0}, enable_checkpointing=False)  # type: ignore[arg-type]
        trainer.fit(BoringModel())
        trainer.save_checkpoint("module.ckpt")
        names["checkpoint"] = "module.ckpt"
    if "run_dir)" in code:
        names["run_dir"] = lit_mnist.train(max_steps=5, run_dir="run", devices=1)["run_dir"]
    shutil.copy(ROOT / "examples" / "doctor" / "train.py", "train.py")
    return names


def run(code: str, folder: Path) -> None:
    def work() -> int:
        os.chdir(folder)
        exec(compile(code, "example", "exec"), names_for(code))  # noqa: S102
        return 0

    (folder / "output").mkdir()
    done = run_forked(work, folder / "output", 280)
    assert done.code == 0, f"{code}\n{done.out}{done.err}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_example_of_a_public_name_runs(name: str, tmp_path: Path) -> None:
    code = example_of(inspect.getdoc(found(name)) or "")
    assert code.strip(), f"{name} has no example"
    run(code, tmp_path)


def test_the_examples_of_the_pages_run(tmp_path: Path) -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert all(f"::: {name}\n\n```python\n" in text for name in ON_PAGE)
    for page in PAGES:
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            folder = tmp_path / f"{page.stem}{number}"
            folder.mkdir()
            run(code, folder)


def described(name: str) -> tuple[str, list[str]]:
    """Returns the docstring of a public name, and the arguments that it must describe."""
    value: Callable[..., Any] = found(name)
    text = inspect.getdoc(value) or ""
    signature = inspect.signature(value.__init__ if inspect.isclass(value) else value)  # type: ignore[misc]
    return text, [name for name in signature.parameters if name not in {"self", "args", "kwargs"}]


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_docstring_of_a_public_name_describes_each_argument(name: str) -> None:
    text, arguments = described(name)
    missing = [argument for argument in arguments if not re.search(rf"^ +\**{argument}:", text, re.MULTILINE)]
    assert not missing
