"""An interrupted training goes on where it was, in or between epochs, and ends with the same bits."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from conftest import Program, result_of
from test_bad_input import refused

from lit_mnist.training import run_folder
from lit_mnist.training.checkpoint import FORMAT, SECTION, write_checkpoint
from lit_mnist.training.checkpoint_folder import remove_unfit
from lit_mnist.training.history import read_history

SMALL = ("--data.train_size", 960, "--data.val_size", 100, "--data.test_size", 100, "--batch-size", 96, "--lr", 0.05)


@pytest.mark.parametrize(
    "settings",
    [
        ("--devices", 2, "--model.net", "convnet", "--data.augment", "affine"),
        pytest.param(
            ("--devices", 2, "--model.net", "basicnet", "--model.optimizer", "adamw", "--lr", 0.001),
            marks=pytest.mark.slow,
        ),
        ("--devices", 1, "--trainer.accumulate_grad_batches", 4),
    ],
    ids=["convnet", "basicnet", "accumulation"],
)
def test_a_constant_schedule_resumed_after_an_epoch_ends_with_the_same_bits(
    program: Program, settings: tuple[object, ...]
) -> None:
    settings = tuple(dict(zip(*[iter((*SMALL, *settings))] * 2, strict=True)).items())
    flags = [word for pair in settings for word in pair]
    flags += ["--model.schedule", "constant"]
    whole = program.train(*flags, "--epochs", 3)
    parts = program.train(*flags, "--epochs", 1)
    done = program("--resume", parts, "--epochs", 3)
    assert done.code == 0, done.err
    assert result_of(parts)["weights_sha256"] == result_of(whole)["weights_sha256"]
    assert result_of(parts)["steps"] == result_of(whole)["steps"]
    assert result_of(parts)["test"] == result_of(whole)["test"]
    # All but the speed.
    rows = [[{**row, "images_per_s": None} for row in read_history(folder)] for folder in (parts, whole)]
    assert rows[0] == rows[1]


def test_auto_means_the_precision_that_the_training_began_with(program: Program) -> None:
    """A configuration file states it again where a scheduler submits the same command once more."""
    trained = program.train(*SMALL, "--precision", "32-true", "--model.schedule", "constant", "--epochs", 1)
    refused(program("--resume", trained, "--epochs", 2, "--precision", "bf16-mixed"), "trainer.precision", "32-true")
    done = program("--resume", trained, "--epochs", 2, "--precision", "auto")
    assert done.code == 0, done.err
    assert result_of(trained)["precision"] == "32-true"
    assert result_of(trained)["epochs"] == 2


def test_what_would_be_another_training_is_refused(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    refused(program("--resume", trained), "10 steps", "nothing to go on with")
    refused(program("--resume", trained, "--epochs", 2), "onecycle", "cannot be changed to 20")
    refused(program("--resume", trained, "--lr", 0.5), "model.lr", "0.5", "0.05")
    refused(program("--resume", trained, "--model.net", "basicnet"), "model.net", "basicnet", "convnet")
    refused(program("--resume", trained, "--data.val_size", 0), "data.val_size")
    refused(program("--resume", trained, "--seed", 1), "seed_everything")
    refused(program("test", "--ckpt", trained, "--model.net", "basicnet"), "model.net", "basicnet", "convnet")


def test_the_saved_configuration_repeats_the_run(program: Program) -> None:
    first = program.train(*SMALL, "--devices", 2, "--epochs", 1)
    again = program.train("--config", first / "config.yaml")
    assert result_of(again)["weights_sha256"] == result_of(first)["weights_sha256"]
    assert result_of(again)["world_size"] == 2


def test_a_checkpoint_elsewhere_goes_on_in_a_folder_of_its_own(program: Program) -> None:
    """Only a run folder is taken up in place: a file that lies anywhere must not make its surroundings one."""
    trained = program.train(*SMALL, "--epochs", 1, "--model.schedule", "constant")
    place = program.folder / "downloads"
    place.mkdir()
    (trained / "checkpoints" / "last.ckpt").rename(place / "some.ckpt")
    before = sorted(path.name for path in program.folder.iterdir())
    done = program("--resume", place / "some.ckpt", "--epochs", 2)
    assert done.code == 0, done.err
    assert "after step 10" in done.out
    assert [path.name for path in place.iterdir()] == ["some.ckpt"]
    assert sorted(path.name for path in program.folder.iterdir() if path.name != "runs") == before
    (folder,) = (program.folder / "runs").iterdir()
    assert result_of(folder)["steps"] == 20


def test_the_best_weights_of_a_future_that_was_given_up_are_not_tested(program: Program) -> None:
    flags = (*SMALL, "--model.schedule", "constant", "--keep", 4)
    trained, wanted = program.train(*flags, "--epochs", 3), program.train(*flags, "--epochs", 2)
    first = trained / "checkpoints" / "step-00000010.ckpt"
    (trained / "checkpoints" / "best.ckpt").write_bytes((trained / "checkpoints" / "last.ckpt").read_bytes())
    done = program("--resume", first, "--epochs", 2)
    assert done.code == 0, done.err
    assert "best.ckpt was made after step 30, and the run goes on after step 10" in done.out + done.err
    assert result_of(trained)["weights_sha256"] == result_of(wanted)["weights_sha256"]
    assert result_of(trained)["test"] == result_of(wanted)["test"]


@pytest.mark.parametrize(
    ("content", "told"),
    [({"global_step": 4}, "after step 4"), ({}, "its step"), (b"cut", "not a checkpoint"), ({"global_step": 3}, None)],
    ids=["later", "of no run", "damaged", "as old"],
)
def test_a_best_checkpoint_that_cannot_stay_is_removed_and_named(
    tmp_path: Path, content: dict[str, int] | bytes, told: str | None
) -> None:
    best, said = tmp_path / "best.ckpt", list[str]()
    if isinstance(content, bytes):
        best.write_bytes(content)
    else:
        write_checkpoint(best, {**content, SECTION: {"format": FORMAT}})
    remove_unfit(best, 3, said.append)
    assert best.exists() == (told is None)
    assert [told in text and "removed" in text for text in said if told] == [True] * (told is not None)
    assert len(said) == (told is not None)


def test_a_folder_that_fills_up_while_it_is_prepared_is_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = program.train(*SMALL, "--epochs", 1, "--model.schedule", "constant")

    def full(path: object, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_text", full)
    again = program.folder / "again"
    refused(program("--resume", trained, "--epochs", 2, "--run-dir", again), "cannot be written: No space left")
    assert (again / "run.lock").read_text() == ""


def test_an_evaluation_tells_the_weights_that_it_evaluated(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    for verb in ("test", "validate"):
        found = result_of(program.train(verb, "--ckpt", trained))
        assert found["weights_sha256"] == result_of(trained)["weights_sha256"]
    validation = result_of(program.train("validate", "--ckpt", trained))["validation"]
    assert validation == result_of(trained)["validation"]
    refused(program("validate", "--ckpt", trained, "--seed", 7), "seed_everything")
    refused(program("validate", "--ckpt", trained, "--data.val_size", 50), "data.val_size")


def test_a_diverged_training_ends_with_exit_code_4(program: Program) -> None:
    folder = program.folder / "diverged"
    done = program(*SMALL[:-2], "--lr", 1e30, "--devices", 2, "--run-dir", folder)
    assert done.code == 4, done.out + done.err
    assert "error: The loss was" in done.err
    assert "Traceback" not in done.err
    assert not (folder / "checkpoints" / "last.ckpt").exists()
