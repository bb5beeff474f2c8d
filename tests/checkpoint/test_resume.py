"""An interrupted training resumes at its step, in or between epochs, and ends with bit-identical weights."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, result_of, weights_of
from processes import assert_rejected, forked, wait_for

from lit_mnist.checkpoint.format import SECTION, read_checkpoint, write_checkpoint
from lit_mnist.errors import InputError
from lit_mnist.run import folder as run_folder
from lit_mnist.run.folder import RunFolder
from lit_mnist.run.metrics_log import read_metrics
from lit_mnist.training.resume import SavedExperiment

SMALL = (
    *("--data.train_size", 960, "--data.val_size", 100, "--data.test_size", 100, "--run.threads", 1),
    *("--batch-size", 96, "--lr", 0.05),
)


@pytest.mark.parametrize(
    "settings",
    [
        ("--devices", 2, "--model.net", "convnet", "--data.augment", "affine"),
        pytest.param(
            ("--devices", 2, "--model.net", "basicnet", "--model.optimizer", "adamw", "--lr", 0.001),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--devices", 1, "--trainer.accumulate_grad_batches", 4), marks=pytest.mark.slow),
    ],
    ids=["convnet", "basicnet", "accumulation"],
)
def test_a_constant_schedule_resumed_after_an_epoch_is_bit_identical(
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
    # Time and speed are those since the resume in the summary, the report and result.json.
    steps = result_of(whole)["steps"]
    assert result_of(whole)["train"]["steps"] == result_of(whole)["train"]["scheduled_steps"] == steps
    assert result_of(parts)["train"]["steps"] == steps * 2 // 3
    assert re.search(
        rf"trained   {steps * 2 // 3} steps on .* in [\d.]+ s since the resume after step {steps // 3}", done.out
    )
    output = f"the last {steps * 2 // 3} of {steps} steps, since the resume"
    assert output in (parts / "report.html").read_text()
    assert "since the resume" not in (whole / "report.html").read_text()
    # All columns except the speed.
    rows = [[{**row, "images_per_s": None} for row in read_metrics(folder)] for folder in (parts, whole)]
    assert rows[0] == rows[1]


def test_auto_resumes_with_the_precision_of_the_first_start(program: Program) -> None:
    """A scheduler may submit the same command with its configuration file again."""
    trained = program.train(*SMALL, "--precision", "32-true", "--model.schedule", "constant", "--epochs", 1)
    assert_rejected(
        program("--resume", trained, "--epochs", 2, "--precision", "bf16-mixed"), "trainer.precision", "32-true"
    )
    done = program("--resume", trained, "--epochs", 2, "--precision", "auto")
    assert done.code == 0, done.err
    assert result_of(trained)["precision"] == "32-true"
    assert result_of(trained)["epochs"] == 2


def test_settings_of_another_training_are_rejected(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    assert_rejected(program("--resume", trained, "--lr", 0.5), "model.lr", "0.5", "0.05")
    assert_rejected(program("--resume", trained, "--model.net", "basicnet"), "model.net", "basicnet", "convnet")
    assert_rejected(program("--resume", trained, "--data.val_size", 0), "data.val_size")
    assert_rejected(program("--resume", trained, "--seed", 1), "seed_everything")
    assert_rejected(program("test", "--ckpt", trained, "--model.net", "basicnet"), "model.net", "basicnet", "convnet")


def test_the_saved_configuration_repeats_the_run(program: Program) -> None:
    first = program.train(*SMALL, "--devices", 2, "--epochs", 1)
    again = program.train("--config", first / "config.yaml")
    assert result_of(again)["weights_sha256"] == result_of(first)["weights_sha256"]
    assert result_of(again)["world_size"] == 2


def test_a_checkpoint_elsewhere_resumes_in_a_new_folder(program: Program) -> None:
    """Only a run folder is resumed in place. A file elsewhere must not turn its folder into a run folder."""
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


@pytest.mark.slow
def test_the_best_weights_of_discarded_steps_are_not_tested(program: Program) -> None:
    flags = (*SMALL, "--model.schedule", "constant", "--keep", 4)
    trained, wanted = program.train(*flags, "--epochs", 3), program.train(*flags, "--epochs", 2)
    first = trained / "checkpoints" / "step-00000010.ckpt"
    (trained / "checkpoints" / "best.ckpt").write_bytes((trained / "checkpoints" / "last.ckpt").read_bytes())
    done = program("--resume", first, "--epochs", 2)
    assert done.code == 0, done.err
    assert "best.ckpt was saved after step 30, but the run resumes after step 10" in done.out + done.err
    assert result_of(trained)["weights_sha256"] == result_of(wanted)["weights_sha256"]
    assert result_of(trained)["test"] == result_of(wanted)["test"]


def test_the_advice_at_the_end_of_a_schedule_works(program: Program) -> None:
    """The test runs the command of the message."""
    trained = program.train(*SMALL, "--epochs", 1)
    cases = {(): ("10 steps", "nothing to resume"), ("--epochs", 2): ("onecycle", "cannot be changed to 20")}
    for flags, output in cases.items():
        done = program("--resume", trained, *flags)
        assert_rejected(done, *output)
        words = shlex.split(done.err.partition("begin a new run with these weights: ")[2])
        assert words == ["--config", "run-1/config.yaml", "--model.weights", "run-1"]
    # With such a learning rate the weights do not change.
    further = program.train(*words, "--epochs", 2, "--max-steps", 1, "--lr", 1e-12)
    before, after = weights_of(trained, "best.ckpt"), weights_of(further)
    moved = [name for name in before if "running" not in name and "tracked" not in name]
    assert max(float((before[name] - after[name]).abs().max()) for name in moved) < 1e-6


@pytest.mark.slow
def test_a_resume_on_another_machine_uses_the_same_number_of_threads(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads affects the last bits, and its default depends on the cores of the machine."""

    def machine(cores: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    machine(3)
    flags = (*SMALL, "--run.threads", "null", "--model.schedule", "constant")
    whole, parts = program.train(*flags, "--epochs", 2), program.train(*flags, "--epochs", 1)
    machine(1)
    done = program("--resume", parts, "--epochs", 2)
    assert done.code == 0, done.err
    assert result_of(parts)["threads"] == result_of(whole)["threads"] == 3
    assert result_of(parts)["weights_sha256"] == result_of(whole)["weights_sha256"]
    assert "warning: each rank uses 3 threads, as before; the default for 1 cores is 1." in done.out
    # The configuration still has no number.
    assert "threads: null" in (parts / "config.yaml").read_text()
    # With other ranks or another setting the result is not bit-identical, and a message says so.
    machine(4)
    saved, said = SavedExperiment.read(parts / "checkpoints" / "last.ckpt"), list[str]()
    assert saved.threads(None, 2, said.append) == 2
    assert "uses 2 threads, but 3 before (there were 1 ranks per machine before, and here are 2)" in said.pop()
    assert saved.threads(2, 1, said.append) == 2
    assert "uses 2 threads, but 3 before (run.threads is 2)" in said.pop()
    assert saved.threads(3, 2, said.append) == 3
    assert not said


class Predecessor:
    """A run that saves its newest checkpoints and ends while the next start waits for its folder."""

    def __init__(self, folder: Path, newer: dict[str, bytes]) -> None:
        self.folder, self.newer = folder, newer

    def hold(self, successor: Path) -> int:
        """Holds the folder until the successor waits for it, then saves, and ends."""
        # An attribute, since the lock ends with the object.
        self.held = RunFolder.claim(self.folder, writes=(), resumed=True)
        successor.with_name("held").touch()
        lock = str(self.folder / "run.lock")
        wait_for(lambda: successor.exists() and lock in opened_by(int(successor.read_text())), 60)
        for name, content in self.newer.items():
            (self.folder / "checkpoints" / name).unlink(missing_ok=True)
            (self.folder / "checkpoints" / name).write_bytes(content)
        return 0


def opened_by(pid: int) -> set[str]:
    """Returns the files that a process has open."""
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(entry.readlink()))
    return found


def test_a_start_waits_for_the_previous_run_and_reads_its_last_checkpoint(program: Program) -> None:
    flags = (*SMALL, "--model.schedule", "constant", "--epochs", 3, "--save-every", 4, "--keep", 20)
    folder = program.train(*flags)
    wanted, checkpoints = result_of(folder), folder / "checkpoints"
    # At first the state after step 14 of 30. The predecessor leaves that after step 24, with the best of step 20.
    newer = {"last.ckpt": "step-00000024.ckpt", "best.ckpt": "step-00000020.ckpt"}
    saved = {name: (checkpoints / source).read_bytes() for name, source in newer.items()}
    (checkpoints / "last.ckpt").unlink()
    (checkpoints / "best.ckpt").unlink()
    shutil.copy(checkpoints / "step-00000012.ckpt", checkpoints / "last.ckpt")
    shutil.copy(checkpoints / "step-00000010.ckpt", checkpoints / "best.ckpt")
    for path in checkpoints.glob("step-*"):
        if path.name > "step-00000012":
            path.unlink()
    (folder / "result.json").unlink()
    place = program.folder / "predecessor"
    place.mkdir()
    before = Predecessor(folder, saved)
    successor = place / "successor"
    with forked(lambda: before.hold(successor), place):
        wait_for((place / "held").exists, 30, place)
        with program.started(*flags, "--resume", "auto", "--run-dir", folder) as group:
            (place / "pid").write_text(str(group))
            (place / "pid").rename(successor)
            _, status = wait_for(lambda: (found := os.waitpid(group, os.WNOHANG))[0] and found, 120, program.folder)
    out = (program.folder / "stdout.txt").read_text()
    assert os.waitstatus_to_exitcode(status) == 0, out + (program.folder / "stderr.txt").read_text()
    assert "note: waiting for process" in out
    assert "resuming from run-1/checkpoints/last.ckpt after step 24" in out
    assert "warning" not in out
    assert result_of(folder)["weights_sha256"] == wanted["weights_sha256"]
    assert result_of(folder)["test"] == wanted["test"]


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    flags = (*SMALL, "--model.schedule", "constant", "--epochs", 2, "--save-every", 4, "--keep", 20)
    return shared_program.train(*flags)


Change = Callable[[dict[str, Any]], None]


def setting(section: str, name: str, value: object) -> Change:
    return lambda content: content[SECTION]["config"][section].__setitem__(name, value)


OTHERS: dict[str, tuple[Change, str]] = {
    "later": (lambda content: content.update(global_step=17), "after step 17, but the run resumes after step 16"),
    "other data": (lambda content: content[SECTION].update(data_sha256="0"), "its data_sha256 is 0"),
    "another model": (setting("model", "label_smoothing", 0.1), "its model.label_smoothing is 0.1, not 0.0"),
    "another network": (setting("model", "net", "basicnet"), "does not hold the weights"),
    "another beginning": (setting("model", "weights", "other.ckpt"), "its model.weights is other.ckpt, not none"),
    "another seed": (lambda content: content[SECTION]["config"].update(seed_everything=1), "seed_everything is 1"),
    "another epoch": (
        lambda content: content["callbacks"].update(KeepCheckpoints={"best": 0.5}),
        "not of the best epoch",
    ),
    "a worse epoch": (
        lambda content: content["callbacks"].update(KeepCheckpoints={"best": 0.0}),
        "not of the best epoch",
    ),
    "of no run": (lambda content: content.pop("loops"), "its loops is missing"),
}


@pytest.mark.parametrize("case", [*OTHERS, "damaged", "missing", "its own"])
def test_the_best_checkpoint_is_kept_only_if_it_belongs_to_this_training(
    tmp_path: Path, trained: Path, case: str
) -> None:
    """Data, model and score are compared, not only the step."""
    last, best = trained / "checkpoints" / "step-00000016.ckpt", tmp_path / "best.ckpt"
    # Of two epochs of 10 steps, the first is the best after step 16.
    shutil.copy(trained / "checkpoints" / "step-00000010.ckpt", best)
    output = "There is no checkpoint at"
    if case in OTHERS:
        change, output = OTHERS[case]
        content = read_checkpoint(best)
        change(content)
        write_checkpoint(best, content)
    elif case == "damaged":
        best.write_bytes(best.read_bytes()[:-500])
        output = "is damaged"
    elif case == "missing":
        best.unlink()
    else:
        SavedExperiment.read(last).check_best(best)
        return
    with pytest.raises(InputError, match=output):
        SavedExperiment.read(last).check_best(best)


def test_a_resume_within_the_first_epoch_does_not_warn_of_lost_best_weights(program: Program) -> None:
    folder, copied = program.folder / "run", program.folder / "copied"
    for words, run in (((*SMALL, "--epochs", 1), folder), (("--resume", folder), copied)):
        lost = program(*words, "--run-dir", run, "--save-every", 1, "--inject", "kill:rank=0,step=8")
        assert lost.code == -signal.SIGKILL, lost.err
        assert "best weights" not in lost.out + lost.err
    done = program("--resume", folder)
    assert done.code == 0, done.err
    assert "resuming from" in done.out
    assert "warning" not in done.out + done.err
    assert read_checkpoint(folder / "checkpoints" / "best.ckpt")["global_step"] == 10


def test_the_best_of_a_run_resumed_from_a_file_is_one_of_its_epochs(program: Program, trained: Path) -> None:
    """Weights that were never the best, or that belong to another run, are not called the best."""
    downloads, folder = program.folder / "downloads", program.folder / "run"
    downloads.mkdir()
    shutil.copy(trained / "checkpoints" / "step-00000016.ckpt", downloads / "some.ckpt")
    for beside in (None, "other.ckpt"):
        if beside:
            shutil.rmtree(folder)
            other = program.train(*SMALL, "--seed", 1, "--max-steps", 10)
            shutil.copy(other / "checkpoints" / "best.ckpt", downloads / "best.ckpt")
        words = ("--resume", downloads / "some.ckpt", "--epochs", 2, "--run-dir", folder, "--save-every", 1)
        lost = program(*words, "--inject", "kill:rank=0,step=18")
        assert lost.code == -signal.SIGKILL, lost.err
        names = {path.name for path in (folder / "checkpoints").iterdir()}
        assert "best.ckpt" not in names, names
        assert "The best weights until step 16 are not known." in lost.out
        assert ("seed_everything is 1, not 42" in lost.out) == (beside is not None)
    done = program("--resume", folder)
    assert done.code == 0, done.err
    assert read_checkpoint(folder / "checkpoints" / "best.ckpt")["global_step"] == 20
    assert result_of(folder)["weights_sha256"] == result_of(trained)["weights_sha256"]
    # Its own best checkpoint is copied.
    shutil.copy(trained / "checkpoints" / "step-00000010.ckpt", downloads / "best.ckpt")
    shutil.rmtree(folder)
    lost = program(*words, "--inject", "kill:rank=0,step=18")
    assert "not known" not in lost.out
    assert read_checkpoint(folder / "checkpoints" / "best.ckpt")["global_step"] == 10


def test_a_best_checkpoint_of_another_run_is_never_tested(program: Program, trained: Path) -> None:
    folder = program.folder / "run"
    shutil.copytree(trained, folder)
    (folder / "result.json").unlink()
    shutil.copytree(folder, program.folder / "own")
    other = program.train(*SMALL, "--seed", 1, "--max-steps", 10)
    best = folder / "checkpoints" / "best.ckpt"
    best.unlink()
    shutil.copy(other / "checkpoints" / "best.ckpt", best)
    done = program("--resume", "auto", "--run-dir", folder)
    assert_rejected(
        done,
        "its best weights are not known",
        f"test --ckpt {folder}/checkpoints/last.ckpt",
        "seed_everything is 1, not 42",
    )
    assert best.read_bytes() == (other / "checkpoints" / "best.ckpt").read_bytes()
    assert (folder / "run.lock").read_text() == ""
    done = program("--resume", "auto", "--run-dir", program.folder / "own")
    assert done.code == 0, done.err
    assert result_of(program.folder / "own")["test"] == result_of(trained)["test"]


def test_a_disk_that_fills_up_during_preparation_is_rejected(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = program.train(*SMALL, "--epochs", 1, "--model.schedule", "constant")

    def full(path: object, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_text", full)
    again = program.folder / "again"
    assert_rejected(program("--resume", trained, "--epochs", 2, "--run-dir", again), "cannot be written: No space left")
    assert not again.exists()


def test_an_evaluation_reports_the_weights_that_it_evaluated(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    for subcommand in ("test", "validate"):
        found = result_of(program.train(subcommand, "--ckpt", trained))
        assert found["weights_sha256"] == result_of(trained)["weights_sha256"]
    validation = result_of(program.train("validate", "--ckpt", trained))["validation"]
    assert validation == result_of(trained)["validation"]
    assert_rejected(program("validate", "--ckpt", trained, "--seed", 7), "seed_everything")
    assert_rejected(program("validate", "--ckpt", trained, "--data.val_size", 50), "data.val_size")


def test_an_evaluation_names_the_checkpoint_that_it_evaluated(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    best, last = (trained / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    assert result_of(trained)["checkpoint"] is None
    assert result_of(program.train("test", "--ckpt", trained))["checkpoint"] == str(best)
    best.unlink()
    folder = program.folder / "tested"
    done = program("test", "--ckpt", trained, "--run-dir", folder)
    assert done.code == 0, done.err
    assert f"{trained} has no best.ckpt: these are the last weights, {last}" in done.out
    assert result_of(folder)["checkpoint"] == str(last)
    # A file that is given explicitly causes no note.
    assert "these are the last weights" not in program("test", "--ckpt", last).out


def test_a_diverged_training_ends_with_exit_code_4(program: Program) -> None:
    folder = program.folder / "diverged"
    done = program(*SMALL[:-2], "--lr", 1e30, "--devices", 2, "--run-dir", folder)
    assert done.code == 4, done.out + done.err
    assert "error: The loss was" in done.err
    assert "Traceback" not in done.err
    assert not (folder / "checkpoints" / "last.ckpt").exists()


def test_two_processes_do_not_resume_one_folder(program: Program) -> None:
    folder = program.train(*SMALL, "--epochs", 1, "--model.schedule", "constant")
    second = Program(program.folder / "second")
    second.folder.mkdir()
    with program.started("--resume", folder, "--epochs", 1000) as first:
        wait_for(lambda: f"process {first} " in (folder / "run.lock").read_text(), 60, program.folder)
        assert_rejected(second("--resume", folder, "--epochs", 2), f"in use by process {first} on ")
