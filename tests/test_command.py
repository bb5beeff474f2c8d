"""The command: LightningCLI's conventions, rejected input, and a user's own module."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launching import Completed

USER = ("--model", "others.Net", "--data", "others.Points")
BORING = "lightning.pytorch.demos.boring_classes"

FILES = {
    "flat.yaml": "seed_everything: 7\nmodel: {lr: 0.05}\ndata: {batch_size: 128}\ntrainer: {max_epochs: 3}\n",
    "more.yaml": "model: {momentum: 0.8}\n",
    "sections.yaml": "fit:\n  model: {lr: 0.07}\ntest:\n  model: {lr: 0.08}\n",
    "trainer.yaml": "max_epochs: 4\n",
    "user.yaml": "model:\n  class_path: others.Net\n  init_args: {hidden: 5}\ndata: {class_path: others.Points}\n",
    "damaged.yaml": "model: [\n",
    "unknown.yaml": "model: {lrr: 0.1}\n",
}


@pytest.fixture
def files(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)


def value(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        if isinstance(config, dict) and part not in config and "init_args" in config:
            config = config["init_args"]
        config = config[part]
    return config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fit", {"model.lr": 0.1, "seed_everything": 42}),
        ("train", {"model.class_path": "lit_mnist.module.LitClassifier"}),
        ("fit --config flat.yaml", {"model.lr": 0.05, "data.batch_size": 128, "seed_everything": 7}),
        ("--config flat.yaml fit", {"model.lr": 0.05, "trainer.max_epochs": 3}),
        ("--config=flat.yaml", {"model.lr": 0.05}),
        ("fit --config flat.yaml --config more.yaml", {"model.lr": 0.05, "model.momentum": 0.8}),
        ("--config sections.yaml fit", {"model.lr": 0.07}),
        ("--config sections.yaml test", {"model.lr": 0.08}),
        ("fit --config {'model':{'lr':0.3}}", {"model.lr": 0.3}),
        ("fit --config flat.yaml --lr 0.2 --epochs 9", {"model.lr": 0.2, "trainer.max_epochs": 9}),
        ("--devices 2 --max-steps 5 fit --batch-size 32", {"trainer.devices": "2", "data.batch_size": 32}),
        ("fit --run-dir a --precision bf16-true --seed 3", {"trainer.precision": "bf16-true", "seed_everything": 3}),
        ("fit --optimizer SGD --optimizer.lr 0.5", {"optimizer.class_path": "torch.optim.SGD", "optimizer.lr": 0.5}),
        ("fit --optimizer SGD --lr_scheduler StepLR --lr_scheduler.step_size 3", {"lr_scheduler.step_size": 3}),
        ("fit --trainer trainer.yaml", {"trainer.max_epochs": 4}),
        ("fit --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitor=x", {"model.lr": 0.1}),
        ("fit --trainer.plugins Float16OnCPU --trainer.enable_checkpointing false", {"model.lr": 0.1}),
        ("fit --trainer.strategy ddp_find_unused_parameters_true", {"trainer.devices": "auto"}),
        ("fit --model LitClassifier --data MNISTDataModule --model.lr 0.4", {"model.lr": 0.4}),
        ("fit --model lit_mnist.LitClassifier", {"model.lr": 0.1}),
        ("fit --model others.Net --data others.Points", {"model.lr": 0.01, "data.batch_size": 12}),
        ("fit --config user.yaml --model.hidden 7", {"model.hidden": 7, "model.class_path": "others.Net"}),
        ("test --verbose false --ckpt_path best", {"ckpt_path": "best", "verbose": False}),
        ("predict --return_predictions false --ckpt_path last", {"return_predictions": False}),
        ("validate --data.val_size 100", {"data.val_size": 100}),
    ],
)
@pytest.mark.usefixtures("files")
def test_the_conventions_of_lightning_cli(
    command: Callable[..., Completed], words: str, expected: dict[str, Any]
) -> None:
    completed = command(*words.split(), "--print_config")
    assert completed.code == 0, completed.output
    config = yaml.safe_load(completed.output.split("# lightning.pytorch", 1)[1].split("\n", 1)[1])
    assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize("words", ["--help", "fit --help", "fit --model.help", "fit --data.help others.Points"])
def test_help(command: Callable[..., Completed], words: str) -> None:
    completed = command(*words.split())
    assert completed.code == 0 and "usage" in completed.output


STOCK = """
from lightning.pytorch.cli import LightningCLI
from lit_mnist import LitClassifier, MNISTDataModule
def main(words):
    LightningCLI(LitClassifier, MNISTDataModule, args=words)
"""


def test_a_configuration_that_a_stock_cli_has_saved(command: Callable[..., Completed], tmp_path: Path) -> None:
    (tmp_path / "stock.py").write_text(STOCK)
    printed = command("-m", "stock", "fit", "--model.lr", "0.3", "--print_config")
    (tmp_path / "saved.yaml").write_text(printed.output[printed.output.index("# lightning.pytorch") :])
    completed = command("--config", "saved.yaml", "fit", "--print_config")
    assert completed.code == 0 and "lr: 0.3" in completed.output, completed.output


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--model.lr abc", "abc"),
        ("--nonsense 1", "--nonsense"),
        ("fitt", "fitt"),
        ("--config missing.yaml", "config"),
        ("--config damaged.yaml", "config"),
        ("--config unknown.yaml", "lrr"),
        ("--model no.such.Class", "no.such.Class"),
        ("--devices 3 --batch-size 64", "64"),
        ("--devices 0", "devices"),
        ("--trainer.accelerator gpu", "accelerator"),
        ("--max-restarts -1", "max_restarts"),
        ("--model.momentum 0", "Nesterov"),
        ("--epochs -1", "schedule"),
        ("-m lit_mnist.engines.fabric --ckpt_path last", "fabric"),
        ("--trainer.strategy nonsense", "nonsense"),
        (f"fit --model {BORING}.ManualOptimBoringModel --trainer.accumulate_grad_batches 2 --devices 2", "manual"),
        ("--precision 17", "17"),
        ("--data.root nowhere", "nowhere"),
        ("--data.root damaged", "SHA-256"),
        ("--data.val_size 60000", "data.val_size"),
        ("--batch-size 0", "0"),
        ("--run-dir earlier", "earlier"),
        ("test --run-dir earlier", "earlier"),
        ("--resume nowhere", "nowhere"),
        ("fit --ckpt_path missing.ckpt", "missing.ckpt"),
        ("test --ckpt cut.ckpt", "cut.ckpt"),
    ],
)
@pytest.mark.usefixtures("files")
def test_bad_input_is_rejected(command: Callable[..., Completed], tmp_path: Path, words: str, key: str) -> None:
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "config.yaml").write_text("{}")
    (tmp_path / "damaged").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "damaged" / f"{name}-ubyte").write_bytes(b"\0" * 100)
    torch.save({"state_dict": {}}, tmp_path / "cut.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:-40])
    before = snapshot(tmp_path)
    completed = command(*words.split(), *([] if "run-dir" in words else ["--run-dir", "run"]), timeout=60)
    assert completed.code == 2, completed.output
    assert key in completed.output and "Traceback" not in completed.output, completed.output
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith((".ckpt", "result.json")) and name not in before]


def test_a_users_module_is_fitted_killed_resumed_tested_and_predicted(
    command: Callable[..., Completed], train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    words = ("fit", *USER, "--data.loader", "resumable", "--devices", 2, "--precision", "32-true", "--max-steps", 40)
    saves = ("--trainer.callbacks+=lit_mnist.plugins.ExactCheckpoint", "--trainer.callbacks.every_n_train_steps=3")
    fault = ("--trainer.callbacks+=others.Fault", "--trainer.callbacks.kind=kill_once", "--trainer.callbacks.step=27")
    whole = train(*words, *saves, "--trainer.callbacks.dirpath=whole/checkpoints", run_dir=tmp_path / "whole")
    killed = command(*words, *saves, "--trainer.callbacks.dirpath=run/checkpoints", *fault, "--run-dir", "run")
    assert killed.code == 3 and "SIGKILL" in killed.output, killed.output
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 24  # within the third epoch
    resumed = command("--resume", "run")  # by another subcommand
    assert resumed.code == 0, resumed.output
    assert json.loads(Path("run/result.json").read_text())["weights_sha256"] == whole["weights_sha256"]

    tests = [train("test", "--ckpt", "run", "--devices", devices)["test"] for devices in (1, 2)]
    assert tests[0]["accuracy"] == tests[1]["accuracy"] and tests[0]["loss"] == pytest.approx(tests[1]["loss"])
    for devices in (1, 2):
        predicted = command("predict", "--ckpt", "run", "--devices", devices, "--run-dir", f"predict-{devices}")
        assert predicted.code == 0, predicted.output
    one, two = (torch.load(f"predict-{devices}/predictions.pt", weights_only=True) for devices in (1, 2))
    assert len(one) == 41 and torch.equal(one, two)
