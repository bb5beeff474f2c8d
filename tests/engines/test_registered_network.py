"""Registered networks and data sets train like the built-in ones: on every engine, any ranks, and resumed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Program, largest_difference, result_of, weights_of
from PIL import Image
from processes import ROOT, torchrun

import examples.registered_network as own
import lit_mnist
from lit_mnist.comparison.equality import Run, compare_runs, first_difference
from lit_mnist.experiment.registry import DATASETS, NETWORKS

IMPORT = ("--import", "examples.registered_network")
# Five batches in an epoch, with batch norm, dropout and augmentation.
SMALL = (
    *(*IMPORT, "--model.net", "patches", "--data.name", "stripes", "--data.augment", "shift", "--lr", 0.05),
    *("--data.val_size", 48, "--data.train_size", 65, "--data.test_size", 101, "--batch-size", 12),
    *("--run.threads", 1),
)
STEPS = ("--epochs", 2, "--max-steps", 8)
RUN = (*SMALL, *STEPS, "--precision", "32-true")
TWO = (*RUN, "--devices", 2)
# The import of this file registers them. Only `--import` may do this for the commands.
for known in (NETWORKS, DATASETS):
    known.clear()
del sys.modules["examples.registered_network"]
DISTRIBUTED = ("raw_ddp", "lightning", "fabric", "with_accelerate", "with_hf_trainer")


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    """A run of two ranks that was not interrupted."""
    return shared_program.train(*TWO, "--run.trace", "steps", engine="raw_ddp")


def test_every_engine_trains_the_same_bits(trained: Path, program: Program) -> None:
    reference = Run.read(trained)
    assert reference.ranks_agree
    for engine in (*DISTRIBUTED[1:], "parameter_server"):
        run = Run.read(program.train(*TWO, "--run.trace", "steps", engine=engine))
        if engine == "parameter_server":
            assert compare_runs(reference, run, expected="1e-05 relative")["met"]
            continue
        assert first_difference(reference, run) is None, engine
        assert run.result["weights_sha256"] == reference.result["weights_sha256"], engine
        assert run.result["test"]["confusion"] == reference.result["test"]["confusion"], engine


@pytest.mark.slow
def test_one_two_and_three_ranks_train_the_same_weights(program: Program) -> None:
    double = (*SMALL, *STEPS, "--precision", "64-true")
    one = program.train(*double, engine="single")
    counts = [result_of(one)["test"]["count"]]
    for ranks, engine in ((2, "raw_ddp"), (3, "lightning")):
        several = program.train(*double, "--devices", ranks, engine=engine)
        assert largest_difference(weights_of(one), weights_of(several)) <= 1e-8
        counts.append(result_of(several)["test"]["count"])
    assert counts == [101, 101, 101]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_torchrun_and_restarted_ranks_train_the_same_bits(trained: Path, program: Program) -> None:
    wanted = result_of(trained)["weights_sha256"]
    folders = {}
    lost = ("--save-every", 2, "--max-restarts", 1, "--inject", "kill:rank=1,step=6")
    for engine in ("raw_ddp", "lightning"):
        folders[f"restarted {engine}"] = program.train(*TWO, *lost, engine=engine)
    folder = program.folder / "torchrun"
    assert torchrun(folder, *RUN).wait(timeout=100) == 0, (program.folder / "torchrun.err").read_text()
    folders["torchrun"] = folder
    for name, found in folders.items():
        assert result_of(found)["weights_sha256"] == wanted, name


@pytest.mark.slow
def test_an_engine_resumes_where_another_stopped(program: Program) -> None:
    words = (*SMALL, "--epochs", 3, "--devices", 2, "--model.schedule", "constant")
    whole = result_of(program.train(*words, "--max-steps", 12, engine="raw_ddp"))
    folder = program.train(*words, "--max-steps", 3, engine="lightning")
    for engine, steps in (("raw_ddp", 8), ("lightning", 12)):
        done = program("--resume", folder, "--max-steps", steps, *IMPORT, engine=engine)
        assert done.code == 0, done.err
        assert f"test --ckpt {folder.name} --import examples.registered_network" in done.out
    assert result_of(folder)["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_a_run_is_evaluated_predicted_and_loaded(trained: Path, program: Program) -> None:
    result = result_of(trained)
    assert result["imports"] == ["examples.registered_network"]
    registered = result["registered"]
    assert registered["model.net"]["object"] == "examples.registered_network.Patches"
    assert registered["data.name"]["file"] == own.__file__
    assert len(registered["model.net"]["sha256"]) == 64
    assert result["data"]["name"] == "stripes"
    for command, split in (("test", "test"), ("validate", "validation")):
        for engine, ranks in (("lightning", 2), ("single", 1)):
            words = (command, "--ckpt", trained, "--devices", ranks, *IMPORT, "--precision", "32-true")
            found = result_of(program.train(*words, engine=engine))[split]
            if split == "test":
                assert found["confusion"] == result["test"]["confusion"], engine
            assert found["count"] == result[split]["count"]
    images = [own.stripes()[1][index][0] for index in range(3)]
    for index, image in enumerate(images):
        Image.fromarray(image).resize((56, 56), Image.Resampling.NEAREST).save(program.folder / f"{index}.png")
    drawn = ("--images", "0.png", "1.png", "2.png", "--run-dir", "drawn", "--precision", "32-true")
    done = program("predict", "--ckpt", trained, *IMPORT, *drawn)
    assert done.code == 0, done.err
    assert "0.png" in done.out, done.out
    folder = program.train("predict", "--ckpt", trained, *IMPORT, "--precision", "32-true", engine="raw_ddp")
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lit_mnist.register_network("patches")(own.Patches)
    lit_mnist.register_dataset("stripes", ("horizontal", "vertical", "diagonal"))(own.stripes)
    try:
        classes, _ = lit_mnist.load(trained).predict(np.stack(images))
    finally:
        # Later tests of this process find neither.
        NETWORKS.clear()
        DATASETS.clear()
    predicted = [int(row["predicted"]) for row in rows[:3]]
    assert classes.tolist() == predicted
    # Scaled back to 28x28 pixels, the images in the files are the same.
    names = ("horizontal", "vertical", "diagonal")
    lines = [line for line in done.out.splitlines() if line[:1].isdigit()]
    assert [line.split()[2] for line in lines] == [names[number] for number in predicted]
    # The configuration of the run folder is complete but for the import.
    again = program.train("--config", trained / "config.yaml", *IMPORT, engine="raw_ddp")
    assert result_of(again)["weights_sha256"] == result["weights_sha256"]


@pytest.mark.slow
def test_compare_imports_the_package_in_the_processes_that_it_starts(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine with `spawn` is a new Python, which finds the examples only here.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ("--engines", "raw_ddp,raw_ddp:spawn,single", "--devices", 2, "--repeats", 0)
    folder = program.folder / "comparison"
    done = program("compare", *words, *RUN, "--run-dir", folder, timeout=150)
    assert done.code == 0, done.out + done.err
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["equal"]
    assert [engine["status"] for engine in comparison["engines"]] == 3 * ["ran"]
    assert comparison["data"]["name"] == "stripes"
