"""Every row of the policy for the options of Lightning's Trainer: they observe, shorten, are spelled differently, or
are rejected with the promise that they would break (the last ones are in test_bad_input.py)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Program, result_of
from processes import assert_rejected

from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.loader import TrainBatches
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.plan import make_plan
from lit_mnist.run.metrics_log import read_metrics
from lit_mnist.run.trainer_settings import TrainerSettings
from lit_mnist.training.job import split_dataset

FEW = ("--data.train_size", 640, "--data.val_size", 100, "--data.test_size", 100, "--data.eval_batch_size", 40)
LOGGER = "lightning.pytorch.loggers.CSVLogger"


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Returns the rows of a CSVLogger."""
    (path,) = folder.glob("**/metrics.csv")
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("engine", ["lightning", "raw_ddp", "fabric"])
def test_a_logger_receives_every_metric_of_every_engine(program: Program, engine: str) -> None:
    logs = program.folder / "logs"
    words = ("--trainer.logger", LOGGER, "--trainer.logger.save_dir", logs, "--trainer.log_every_n_steps", 4)
    folder = program.train(*FEW, *words, "--devices", 2, engine=engine)
    result, rows = result_of(folder), rows_of(logs)
    own = [{name: value for name, value in row.items() if name != "images_per_s"} for row in read_metrics(folder)]
    # Lightning counts the steps of its loggers from 0, metrics.csv from 1.
    assert [row["step"] for row in own] == [1, 4, 8, 10, 10]
    assert [row["step"] for row in rows if "train_loss" in row or "val_loss" in row] == [0, 3, 7, 9, 9]
    for name in ("train_loss", "train_accuracy", "lr", "val_loss", "val_accuracy"):
        logged = [row[name] for row in rows if name in row]
        assert logged == pytest.approx([row[name] for row in own if name in row], rel=1e-6), name
    assert [row["test_loss"] for row in rows if "test_loss" in row] == [result["test"]["loss"]]
    assert list(logs.glob("**/hparams.yaml"))


def test_several_loggers_and_callbacks_that_observe_work_together(program: Program) -> None:
    logs = program.folder / "logs"
    loggers = [
        {"class_path": LOGGER, "init_args": {"save_dir": str(logs / "csv")}},
        {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": {"save_dir": str(logs / "tensorboard")},
        },
    ]
    names = ("LearningRateMonitor", "DeviceStatsMonitor", "RichModelSummary", "RichProgressBar")
    callbacks: list[dict[str, Any]] = [{"class_path": f"lightning.pytorch.callbacks.{name}"} for name in names]
    monitor = {"monitor": "train_loss", "patience": 3}
    callbacks.append({"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": monitor})
    profiler = {
        "class_path": "lightning.pytorch.profilers.SimpleProfiler",
        "init_args": {"dirpath": str(logs), "filename": "profile"},
    }
    trainer = {"logger": loggers, "callbacks": callbacks, "log_every_n_steps": 2, "profiler": profiler}
    config = program.folder / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": trainer}))
    done = program("fit", "--config", config, *FEW, "--devices", 2, "--run-dir", program.folder / "run")
    assert done.code == 0, done.err
    rows = rows_of(logs / "csv")
    assert any("lr-SGD" in row for row in rows)
    assert any(name.startswith("DeviceStatsMonitor") for row in rows for name in row)
    assert list(logs.glob("tensorboard/**/events.out.tfevents.*"))
    # A metric that is new adds a column.
    assert any("lr-SGD" in row for row in read_metrics(program.folder / "run"))
    assert any("run_training_batch" in path.read_text() for path in logs.glob("fit-profile*.txt"))
    assert "Trainable params" in done.out
    saved = yaml.safe_load((program.folder / "run" / "config.yaml").read_text())["trainer"]
    assert len(saved["logger"]) == 2
    assert saved["profiler"]["class_path"] == profiler["class_path"]


def test_a_callback_of_a_package_of_the_user_is_accepted(program: Program) -> None:
    (program.folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from lightning.pytorch import Callback\n"
        "class Note(Callback):\n"
        "    def on_train_end(self, trainer, pl_module):\n"
        "        Path('noted').write_text(str(trainer.global_step))\n"
    )
    folder = program.train("fit", *FEW, "--max-steps", 2, "--import", "mine", "--trainer.callbacks", "mine.Note")
    assert (program.folder / "noted").read_text() == "2"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["callbacks"]["class_path"] == "mine.Note"
    assert_rejected(program("fit", *FEW, "--trainer.callbacks", "mine.Note"), "Add --import mine, if you trust it")


OBSERVE = {
    "no progress bar": ("--trainer.enable_progress_bar", "false"),
    "a summary": ("--trainer.enable_model_summary", "true"),
    "anomalies": ("--trainer.detect_anomaly", "true"),
    "cuDNN's benchmark": ("--trainer.benchmark", "true"),
    "the default logger": ("--trainer.logger", "true"),
    "no other logger": ("--trainer.logger", "false"),
    "a sanity check": ("--trainer.num_sanity_val_steps", 2),
    "a profiler": ("--trainer.profiler", "simple"),
    "no inference mode": ("--trainer.inference_mode", "false"),
}


@pytest.mark.slow
def test_options_that_observe_change_no_weight(program: Program) -> None:
    expected = result_of(program.train(*FEW, "--devices", 1))
    for name, words in OBSERVE.items():
        result = result_of(program.train(*FEW, "--devices", 1, *words))
        assert result["weights_sha256"] == expected["weights_sha256"], name
        assert result["test"] == expected["test"], name
        assert "partial" not in result["test"], name


SHORTER: dict[str, tuple[tuple[object, ...], tuple[int, int, int | None, int]]] = {
    # Options; steps, epochs, samples validated, samples tested. An epoch has 10 batches of 64, the others 3 of 40.
    "batches": (("--trainer.limit_train_batches", 4, "--epochs", 2), (8, 2, 100, 100)),
    "a share of the batches": (("--trainer.limit_train_batches", 0.5), (5, 1, 100, 100)),
    "all batches": (("--trainer.limit_train_batches", 1.0), (10, 1, 100, 100)),
    "a validation": (("--trainer.limit_val_batches", 2), (10, 1, 80, 100)),
    "no validation": (("--trainer.limit_val_batches", 0), (10, 1, None, 100)),
    "a test": (("--trainer.limit_test_batches", 1), (10, 1, 100, 40)),
    "a trial": (("--trainer.fast_dev_run", "true", "--epochs", 3), (1, 1, 40, 40)),
    "a trial of two batches": (("--trainer.fast_dev_run", 2), (2, 1, 80, 80)),
    "few batches": (("--trainer.overfit_batches", 2, "--epochs", 3), (6, 3, 80, 100)),
    "every other epoch": (("--trainer.check_val_every_n_epoch", 2, "--epochs", 3), (30, 3, 100, 100)),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lightning", "single"])
def test_options_that_shorten_are_planned(program: Program, engine: str) -> None:
    """All engines do the same, and the result says where a metric is of a part."""
    for name, (words, expected) in SHORTER.items():
        folder = program.train(*FEW, *words, "--devices", 1, engine=engine)
        result = result_of(folder)
        validation, test = result["validation"], result["test"]
        found = (result["steps"], result["epochs"], validation and validation["count"], test["count"])
        assert found == expected, name
        assert test.get("partial", False) == (test["count"] < 100), name
        if validation:
            assert validation.get("partial", False) == (validation["count"] < 100), name
        validated = [row["step"] for row in read_metrics(folder) if "val_loss" in row]
        every = 20 if name == "every other epoch" else result["steps"] // result["epochs"]
        assert validated == (list(range(every, result["steps"] + 1, every)) if validation else []), name


def test_shorter_trainings_are_equal_on_all_engines_and_ranks(program: Program) -> None:
    words = (*FEW, "--trainer.limit_train_batches", 4, "--epochs", 2, "--precision", "32-true")
    results = [result_of(program.train(*words, "--devices", 2, engine=engine)) for engine in ("lightning", "raw_ddp")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["test"] == results[1]["test"]


def test_overfitting_repeats_the_batches_of_the_first_epoch() -> None:
    for overfit in (0, 2):
        trainer = TrainerSettings(overfit_batches=overfit, max_epochs=3)
        experiment = Experiment(trainer=trainer)
        splits = split_dataset(experiment, load_dataset(experiment.data))
        plan = make_plan(experiment, 1, len(splits.train))
        settings: dict[str, Any] = {"plan": plan, "settings": experiment.data, "seed": 42, "rank": 0}
        epochs = [TrainBatches(splits.train, epoch=epoch, **settings) for epoch in range(3)]
        first = [next(iter(epoch)).indices.tolist() for epoch in epochs]
        assert (first[0] == first[1] == first[2]) == bool(overfit)
        assert [len(epoch) for epoch in epochs] == [overfit or 859] * 3


@pytest.mark.parametrize("engine", ["lightning", "single", "raw_ddp", "fabric"])
@pytest.mark.parametrize(
    ("limit", "value", "batches"),
    [
        ("limit_test_batches", "0.05", "10 batches of the test split"),
        ("limit_test_batches", "0", "10 batches of the test split"),
        ("limit_val_batches", "0.05", "5 batches of the validation split"),
        ("overfit_batches", "0.01", "5 batches of the validation split"),
        ("limit_train_batches", "0.001", "859 batches of an epoch"),
    ],
)
def test_a_limit_that_leaves_no_batch_of_a_training_is_rejected(
    program: Program, engine: str, limit: str, value: str, batches: str
) -> None:
    done = program(f"--trainer.{limit}", value, "--max-steps", 5, engine=engine)
    assert_rejected(done, f"trainer.{limit} {value} leaves none of the {batches}")
    assert not (program.folder / "runs").exists()


def test_a_limit_that_leaves_no_batch_of_an_evaluation_is_rejected(program: Program) -> None:
    # The test split is not part of this training.
    run = program.train("fit", *FEW, "--max-steps", 2, "--devices", 1, "--trainer.limit_test_batches", 0)
    for command, limit in (("test", "test"), ("validate", "val"), ("predict", "predict")):
        for engine in ("lightning", "single"):
            option = f"trainer.limit_{limit}_batches"
            done = program(command, "--ckpt", run, f"--{option}", 0, engine=engine)
            assert_rejected(done, f"{option} 0 leaves none of the 3 batches")
    assert not (program.folder / "runs").exists()


def test_a_prediction_is_limited(program: Program) -> None:
    run = program.train(*FEW, "--max-steps", 2, "--devices", 1)
    done = program("predict", "--ckpt", run, "--trainer.limit_predict_batches", 2, "--run-dir", program.folder / "some")
    assert done.code == 0, done.err
    assert len((program.folder / "some" / "predictions.csv").read_text().splitlines()) == 1 + 80


def test_a_time_limit_stops_the_training_and_is_recorded(program: Program) -> None:
    flags = (*FEW, "--epochs", 500, "--devices", 2, "--model.schedule", "constant")
    done = program("fit", *flags, "--trainer.max_time", "00:00:00:03", "--run-dir", program.folder / "run")
    assert done.code == 0, done.err
    result = result_of(program.folder / "run")
    assert result["stopped_early"].startswith("trainer.max_time is over after")
    assert 0 < result["steps"] < 5000
    assert f"stopped early: {result['stopped_early']}" in done.out


def test_a_validation_within_the_epoch_is_logged(program: Program) -> None:
    folder = program.train(*FEW, "--trainer.val_check_interval", 5, "--devices", 2)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if "val_loss" in row] == [5, 10]
    assert result_of(folder)["validation"]["count"] == 100


SPELLED = {
    "half": (("--precision", "bf16"), ("precision", "bf16-mixed")),
    "single": (("--precision", "32"), ("precision", "32-true")),
    "double": (("--precision", 64), ("precision", "64-true")),
    "a kind of device": (("--trainer.accelerator", "cpu", "--devices", -1), ("world_size", 1)),
}


def test_other_spellings_are_accepted(program: Program) -> None:
    for name, (words, (key, value)) in SPELLED.items():
        assert result_of(program.train(*FEW, "--max-steps", 1, *words))[key] == value, name
