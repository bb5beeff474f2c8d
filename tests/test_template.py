"""What Lightning itself adds to a step is kept small, by its public interfaces as far as they reach."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, Program, result_of, run_forked
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops import training_epoch_loop
from safetensors.torch import load_file, save_file

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.recording.results import evaluation_results
from lit_mnist.trainer import LitTrainer


@pytest.mark.slow
def test_an_early_stop_is_told_recorded_and_repeated(program: Program) -> None:
    """From the run's own config.yaml, too."""
    few = ("--data.train_size", 256, "--data.val_size", 100, "--data.test_size", 100, "--epochs", 5, "--save-every", 3)
    stop = "{class_path: EarlyStopping, init_args: {monitor: val_loss, patience: 1, min_delta: 50.0}}"
    timer = "{class_path: Timer, init_args: {duration: '01:00:00:00'}}"
    words: list[tuple[object, ...]] = [
        (*few, "--devices", 2, "--trainer.callbacks", f"[{stop}, {timer}]"),
        ("fit", "--config", program.folder / "early-0" / "config.yaml"),
    ]
    results = []
    for number, line in enumerate(words):
        folder = program.folder / f"early-{number}"
        done = program(*line, "--run-dir", folder)
        assert done.code == 0, done.err
        assert "leaves out" not in done.out
        results.append(result_of(folder))
        assert results[-1]["stopped_early"].startswith("val_loss did not improve")
        assert f"stopped early: {results[-1]['stopped_early']}" in done.out.splitlines()
        assert (results[-1]["epochs"], results[-1]["steps"]) == (2, 8)
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        assert [entry["class_path"].rpartition(".")[2] for entry in saved["trainer"]["callbacks"]] == [
            "EarlyStopping",
            "Timer",
        ]
        assert saved["trainer"] == results[-1]["config"]["trainer"]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    whole = result_of(program.train(*few, "--devices", 2))
    assert (whole["epochs"], whole["stopped_early"]) == (5, None)


@pytest.mark.slow
def test_the_python_lines_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    """Beside the run that they name; the training is the default recipe's, whole."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "code.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    few = ("--data.train_size", 640, "--data.val_size", 100, "--data.test_size", 100)
    run = Program(tmp_path).train(*few)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "NAME")

    def work() -> int:
        os.chdir(tmp_path)
        names: dict[str, Any] = {}
        exec(compile(blocks[0], "docs/code.md", "exec"), names)  # noqa: S102
        saved = result_of(tmp_path / "runs" / "NAME")
        assert weights_sha256(names["network"].net.state_dict()) == saved["weights_sha256"]
        assert not names["network"].training
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.err
    # One epoch, with the Trainer's own checkpoint at its end.
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    assert checkpoint.name == "epoch=0-step=859.ckpt"
    tested = Program(tmp_path)("test", "--ckpt", checkpoint, "--run-dir", tmp_path / "tested")
    assert tested.code == 0, tested.err
    assert result_of(tmp_path / "tested")["test"]["accuracy"] > 0.985


def test_the_modules_train_under_a_trainer_of_ones_own(tmp_path: Path) -> None:
    """The same data, order, network and schedule as by the command; safetensors stores the trained network."""

    class ChannelsLast(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            weights = [weight for weight in pl_module.parameters() if weight.ndim == 4]
            assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    def train() -> int:
        data = MNISTDataModule(seed=42, train_size=640, test_size=100)
        trainer = LitTrainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            precision="32-true",
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            callbacks=[ChannelsLast()],
        )
        module = LitClassifier(seed=42)
        trainer.fit(module, datamodule=data)
        save_file(module.net.state_dict(), tmp_path / "net.safetensors")
        assert weights_sha256(load_file(tmp_path / "net.safetensors")) == weights_sha256(module.net.state_dict())
        save_file(torch.load(tmp_path / "own.ckpt", weights_only=True)["state_dict"], tmp_path / "own.safetensors")
        assert module.metrics.last
        assert module.metrics.last.count == 5000
        print(weights_sha256(module.net.state_dict()))
        return 0

    own = run_forked(train, tmp_path)
    assert own.code == 0, own.err
    flags = ("--data.train_size", 640, "--data.test_size", 100, "--precision", "32-true")
    folder = Program(tmp_path).train(*flags, "--devices", 1, "--run.threads", 1)
    assert result_of(folder)["weights_sha256"] in own.out


@pytest.mark.parametrize("several", [True, False])
def test_the_signature_of_a_training_step_is_inspected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """It fails, too, if Lightning inspects it elsewhere: then the private part is of no use any more."""
    asked: list[str] = []
    original = training_epoch_loop.is_param_in_hook_signature

    def counted(hook: Any, param: str, **options: Any) -> bool:
        asked.append(param)
        return original(hook, param, **options)

    monkeypatch.setattr(training_epoch_loop, "is_param_in_hook_signature", counted)
    found: list[tuple[object, ...]] = []

    class WithNumber(LitClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            found.append((batch_idx,))
            return super().training_step(batch, batch_idx)

    class WithoutNumber(LitClassifier):
        def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
            found.append(())
            return super().training_step(batch, len(found) - 1)

    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = LitTrainer(max_steps=3, accelerator="cpu", devices=1, default_root_dir=tmp_path, **options)
    data = MNISTDataModule(train_size=640, val_size=0)
    trainer.fit((WithNumber if several else WithoutNumber)(), datamodule=data)
    assert found == ([(0,), (1,), (2,)] if several else [()] * 3)
    assert asked.count("batch_idx") == 1


def test_an_evaluation_is_never_that_of_another_split(tmp_path: Path) -> None:
    """The Trainer skips a loop that a limit leaves without batches."""

    def work() -> int:
        options: dict[str, Any] = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
        module, data = LitClassifier(), MNISTDataModule(train_size=200, val_size=50, test_size=60)
        Trainer(default_root_dir=tmp_path, **options).validate(module, data, verbose=False)
        assert module.metrics.last is not None
        assert module.metrics.last.count == 50
        logged = Trainer(default_root_dir=tmp_path, limit_test_batches=0, **options).test(module, data, verbose=False)
        assert evaluation_results(module, dict(*logged)) is None
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.err
