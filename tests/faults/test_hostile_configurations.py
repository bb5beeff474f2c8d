"""Hostile configuration files: exit code 2 and one message; nothing they name is run or imported, nothing grows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faults.hostile import ALIASES, CHECKPOINTS, TOUCH
from faults.limits import assert_rejected_safely, limited, measurements, parts, slug

print_measurements = pytest.fixture(scope="module", autouse=True)(measurements)

_CALLBACKS = "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks."
_LAMBDA = _CALLBACKS + "LambdaCallback\n    init_args:\n      setup: "
_PROCESS = (
    "{class_path: torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler, init_args: "
    "{entrypoint: touch, args: [executed], env: {}, stdout: null, stderr: null, local_rank_id: 0, numa_options: null}}"
)
CONFIGS: dict[str, str] = {
    "a foreign class": "trainer:\n  callbacks:\n  - class_path: canary_module.Canary\n",
    "a foreign class by its short form": "trainer:\n  callbacks: canary_module.Canary\n",
    "a foreign logger": "trainer:\n  logger: canary_module.Canary\n",
    "a foreign function": f"{_LAMBDA}canary_module.call\n",
    "os.system": f"{_LAMBDA}os.system\n",
    "os.system by way of torch": f"{_LAMBDA}torch.os.system\n",
    "os.system by way of a callback's module": f"{_LAMBDA}lightning.pytorch.callbacks.lambda_function.os.system\n",
    "a function of torch": f"{_LAMBDA}torch.hub.load\n",
    "a function of torch by way of its networks": f"{_LAMBDA}torch.nn.functional.torch.load\n",
    "a compiled function by way of networks": f"{_LAMBDA}torch.nn.functional.torch.set_num_threads\n",
    "a function that runs a command": f"{_LAMBDA}torch.utils.collect_env.run\n",
    "a class that starts a process": f"{_LAMBDA}{_PROCESS}\n",
    "a class that starts a process, as any value": f"{_CALLBACKS}Timer\n    dict_kwargs: {{x: {_PROCESS}}}\n",
    "a class within a text": f"{_LAMBDA}'{{class_path: canary_module.Canary}}'\n",
    "the program itself": f"{_LAMBDA}lit_mnist.cli.main.main\n",
    "a module that reads the command line": f"{_LAMBDA}torch.testing._internal.common_utils.run_tests\n",
    "a tag that calls": f"model: !!python/object/apply:os.system ['{TOUCH}']\n",
    "a tag that makes": "model: !!python/object/new:canary_module.Canary []\n",
    "a tag that imports": "model: !!python/module:canary_module\n",
    "a tag that names": "model: !!python/name:canary_module.Canary\n",
    "lists of aliases": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 12)),
    "merged aliases": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1},' * 9}]}}\n" for i in range(1, 12)),
    "aliases in callbacks": f"trainer:\n  callbacks: {ALIASES}\n",
    "an alias in itself": "trainer:\n  callbacks: &a [*a]\n",
    "deep lists": "model: " + "[" * 45_000 + "]" * 45_000,
    "lists as deep as Python goes": "model: " + "[" * 900 + "]" * 900,
    "deep mappings": "".join(" " * depth + "a:\n" for depth in range(400)),
    "deep text": f"run:\n  save_every: '{'[' * 50_000}'\n",
    "a long number": "seed_everything: 1" + "0" * 5_000,
    "a long number to another base": "seed_everything: 0x" + "f" * 50_000,
    "a long number of minutes": "seed_everything: 1" + ":59" * 20_000,
    "no date": "data:\n  root: 2026-99-99\n",
    "no number": "model:\n  lr: 0x_\n",
    "a file for a section": "model: /dev/zero\n",
    "a FIFO for a section": "model: fifo\n",
    "a FIFO for callbacks": "trainer:\n  callbacks: fifo\n",
    "a FIFO for a callback": "trainer:\n  callbacks:\n  - fifo\n",
    "a file for callbacks": "trainer:\n  callbacks: more.yaml\n",
    "a key that is no text": "model: {1: 2}\n",
}


@pytest.mark.parametrize("cases", parts(CONFIGS), ids=lambda cases: cases[0])
def test_hostile_configurations_are_rejected(tmp_path: Path, cases: list[str]) -> None:
    for name in cases:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(CONFIGS[name])
        (tmp_path / name / "more.yaml").write_text("- class_path: canary_module.Canary\n")
        os.mkfifo(tmp_path / name / "fifo")
    assert_rejected_safely(limited({name: [("--config", "config.yaml")] for name in cases}, tmp_path))
    assert not list(tmp_path.glob("*/runs"))


def test_paths_that_are_not_configurations_are_rejected(tmp_path: Path) -> None:
    commands = {}
    for name in ("a FIFO", "/dev/zero", "a folder", "a link to itself", "a file of 100 GB"):
        (tmp_path / slug(name)).mkdir()
        CHECKPOINTS[name](tmp_path / slug(name) / "config.yaml")
        commands[slug(name)] = [("--config", "config.yaml"), ("compare", "--config", "config.yaml")]
    (tmp_path / "100 MB").mkdir()
    (tmp_path / "100 MB" / "config.yaml").write_text("model:\n  lr: 0.1\n" + "# 234567\n" * 11_000_000)
    commands["100 MB"] = [("--config", "config.yaml")]
    commands["a FIFO"] += [("--model", "config.yaml"), ("--trainer.callbacks", "config.yaml")]
    assert_rejected_safely(limited(commands, tmp_path))
