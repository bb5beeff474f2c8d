"""A save that is killed, or that finds a full disk: a valid checkpoint exists at every moment."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, result_of
from processes import wait_for

from faults.conftest import SMALL, RecordMetric, read_errors, read_step, wait_for_exit
from faults.ptrace import run_until
from lit_mnist.checkpoint.atomic_io import atomic_link, remove_temporary_files, write_text
from lit_mnist.checkpoint.format import read_checkpoint, write_checkpoint
from lit_mnist.checkpoint.store import CheckpointFolder, find_newest_valid
from lit_mnist.data.digits.family import locked_folder
from lit_mnist.run.folder import RunFolder
from lit_mnist.training.resume import SavedExperiment
from lit_mnist.training.state import MANAGER_STATE


def newest(folder: Path) -> dict[str, Any]:
    """Returns the newest checkpoint of a run folder, which must be valid."""
    found = find_newest_valid(folder, pytest.fail)
    assert found is not None
    return read_checkpoint(found.path)


@pytest.fixture
def trained(program: Program) -> Path:
    """A run that was killed in its second epoch, with its last, an older and its best checkpoint."""
    folder = program.folder / "trained"
    words = (*SMALL, "--epochs", 2, "--save-every", 7, "--inject", "kill:rank=0,step=37")
    assert program(*words, "--run-dir", folder).code == -signal.SIGKILL
    # It may have been saving.
    remove_temporary_files(folder / "checkpoints")
    return folder


def saving(folder: Path, step: int, *, is_best: bool) -> Callable[[], None]:
    """Returns a function that writes the next checkpoint of a run, as the checkpoint manager does."""
    content = newest(folder)
    files = CheckpointFolder(folder / "checkpoints", keep=2, last_step=content["global_step"])
    score = content["callbacks"][MANAGER_STATE]["best"] + is_best * 1e-3
    content |= {"global_step": step, "callbacks": {MANAGER_STATE: {"best": score}}}
    return lambda: files.put(partial(write_checkpoint, checkpoint=content), step, is_best=is_best)


def best_of(folder: Path) -> int:
    """Returns the step of the best checkpoint of a run folder, which must be valid."""
    return int(read_checkpoint(folder / "checkpoints" / "best.ckpt")["global_step"])


def check(folder: Path, before: int, step: int, *, best: set[int]) -> None:
    """Checks a folder after a killed save, and cleans it up as the next start does."""
    assert newest(folder)["global_step"] in {before, step}
    assert best_of(folder) in best
    RunFolder.claim(folder, writes=(), folders=("checkpoints",), resumed=True)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert all(name.endswith(".ckpt") and not name.startswith(".") for name in left), left


@pytest.mark.needs("ptrace")
@pytest.mark.parametrize("is_best", [pytest.param(False, marks=pytest.mark.slow), True], ids=["last", "best"])
@pytest.mark.parametrize(
    ("every", "elsewhere"),
    [(3, False), pytest.param(1, False, marks=pytest.mark.slow), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_a_save_killed_at_any_system_call_leaves_a_valid_checkpoint(
    trained: Path,
    record_metric: RecordMetric,
    every: int,
    elsewhere: bool,
    is_best: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if elsewhere:
        monkeypatch.setenv("TMPDIR", "/dev/shm")
    checkpoints, kept = trained / "checkpoints", trained / "kept"
    if is_best:
        # The previous epoch was also the best: one file with two names.
        (checkpoints / "last.ckpt").unlink()
        os.link(checkpoints / "best.ckpt", checkpoints / "last.ckpt")
        (checkpoints / f"step-{best_of(trained):08d}.ckpt").unlink(missing_ok=True)
    # With its links, so that each save is the same.
    subprocess.run(["cp", "-a", checkpoints, kept], check=True)
    before, best, stop, killed, seen = newest(trained)["global_step"], best_of(trained), 0, 0, set()
    work = saving(trained, before + 1, is_best=is_best)
    while run_until(work, stop) is None:
        check(trained, before, before + 1, best={best, before + 1} if is_best else {best})
        state = newest(trained)["global_step"] - before, best_of(trained) == before + 1
        if state not in seen and state != (0, True):
            # Only the best checkpoint is new: the next start repeats the end of its epoch.
            SavedExperiment.read(checkpoints / "last.ckpt").check_best(checkpoints / "best.ckpt")
        seen.add(state)
        shutil.rmtree(checkpoints)
        subprocess.run(["cp", "-a", kept, checkpoints], check=True)
        killed += 1
        stop += every
    assert killed > 40 // every
    # Whether the last and the best checkpoint were new. All intermediate states occurred.
    assert seen == ({(0, False), (0, True), (1, True)} if is_best else {(0, False), (1, False)})
    assert newest(trained)["global_step"] == before + 1
    assert best_of(trained) == (before + 1 if is_best else best)
    assert (checkpoints / "best.ckpt").samefile(checkpoints / "last.ckpt") == is_best
    record_metric(
        f"SIGKILL at every system call of a save ({'the best' if is_best else 'the last'})",
        f"killed at {killed} places before and after {stop // 2} calls, always a valid one",
    )


def killed_at_instants(folder: Path, count: int, seed: int) -> int:
    """Saves until `count` saves were killed at random times, and returns the number of saves."""
    drawn, killed, saves, whole = random.Random(seed), 0, 0, 0.0
    while killed < count:
        before, best = newest(folder)["global_step"], best_of(folder)
        work = saving(folder, before + 1, is_best=saves % 3 == 0)
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        began = time.monotonic()
        if saves:
            time.sleep(drawn.uniform(0, whole))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        # The first save is not killed, and determines the duration of a save.
        whole = whole or time.monotonic() - began
        killed += os.WIFSIGNALED(status)
        saves += 1
        check(folder, before, before + 1, best={best, before + 1})
        if best_of(folder) > newest(folder)["global_step"]:
            # As the next start does: the epoch is repeated.
            (folder / "checkpoints" / "best.ckpt").unlink()
            shutil.copy(folder / "checkpoints" / "last.ckpt", folder / "checkpoints" / "best.ckpt")
    return saves


@pytest.mark.parametrize("count", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_instant_leaves_a_valid_checkpoint(
    trained: Path, record_metric: RecordMetric, count: int
) -> None:
    saves = killed_at_instants(trained, count, seed=4)
    record_metric(
        "SIGKILL at random instants of a save", f"{count} killed before their end, of {saves}: always a valid one"
    )


def test_the_newest_and_the_best_checkpoints_are_kept(program: Program) -> None:
    folder = program.train(*SMALL, "--epochs", 2, "--save-every", 3, "--keep", 3)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "step-00000036.ckpt", "step-00000039.ckpt"]
    assert newest(folder)["global_step"] == 40
    alone = program.train(*SMALL, "--save-every", 3, "--keep", 1)
    assert sorted(path.name for path in (alone / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize(("engine", "devices"), [("lightning", 2), ("single", 1)])
def test_checkpoints_are_saved_by_time(program: Program, engine: str, devices: int) -> None:
    folder = program.folder / "run"
    words = (*SMALL, "--data.train_size", 36000, "--save-every", "0.4s", "--keep", 1000, "--devices", devices)
    with program.started(*words, "--run-dir", folder, engine=engine) as group:
        wait_for(lambda: len(list((folder / "checkpoints").glob("step-*"))) > 2, 60, program.folder)
        os.kill(group, signal.SIGTERM)
        assert wait_for_exit(group, program, 20)[0] == 143
    steps = [int(path.stem[5:]) for path in sorted((folder / "checkpoints").glob("step-*"))]
    # Well before the epoch's end, at step 1000.
    assert steps[2] < 1000, steps


@pytest.mark.parametrize("damage", ["last", "all"])
def test_a_damaged_checkpoint_is_reported_and_skipped(program: Program, trained: Path, damage: str) -> None:
    whole = result_of(program.train(*SMALL, "--epochs", 2))["weights_sha256"]
    for path in sorted((trained / "checkpoints").iterdir()):
        if damage == "all" or path.name == "last.ckpt":
            content = path.read_bytes()
            # A separate file, since the best checkpoint may be a link to it.
            path.unlink()
            path.write_bytes(content[:-500])
    done = program("--resume", trained)
    if damage == "all":
        assert done.code == 2
        assert "contains no valid checkpoint" in done.err
        return
    assert done.code == 0, done.err
    assert re.search(r"warning: \S+last\.ckpt is ", done.out)
    assert "It is skipped" in done.out
    assert "resuming from" in done.out
    assert result_of(trained)["weights_sha256"] == whole


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A separate file system in memory."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.needs("mounts")
def test_a_full_disk_is_rejected_at_the_start(program: Program) -> None:
    with small_disk(program.folder / "disk", "500k") as disk:
        began = time.monotonic()
        done = program(*SMALL, "--devices", 2, "--run-dir", disk / "run")
        assert time.monotonic() - began < 10
    assert done.code == 2
    assert "cannot be written: No space left on device" in done.err
    assert "Traceback" not in done.err


def fill(path: Path) -> None:
    """Writes a file until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.needs("mounts")
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(program: Program) -> None:
    with small_disk(program.folder / "disk", "4m") as disk:
        folder = disk / "run"
        words = (*SMALL, "--epochs", 50, "--devices", 2, "--save-every", 5, "--run-dir", folder)
        with program.started(*words) as group:
            wait_for(lambda: read_step(folder) > 22, 60, program.folder)
            fill(disk / "others")
            code, _ = wait_for_exit(group, program, 30)
        assert code == 2, read_errors(program)
        assert "No space left on device" in read_errors(program) or "cannot be written" in read_errors(program)
        assert "Traceback" not in read_errors(program)
        assert newest(folder)["global_step"] >= 20
        assert "The newest valid checkpoint, after step" in read_errors(program)


@pytest.mark.needs("mounts")
def test_a_folder_that_becomes_read_only_ends_the_run_and_keeps_the_last_checkpoint(program: Program) -> None:
    folder = program.folder / "run"
    words = (*SMALL, "--epochs", 50, "--devices", 2, "--save-every", 5, "--run-dir", folder)
    checkpoints = folder / "checkpoints"
    with program.started(*words) as group:
        wait_for(lambda: read_step(folder) > 12, 60, program.folder)
        subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
        try:
            remount = ["mount", "-o", "remount,ro,bind", str(checkpoints)]
            # It is busy while a checkpoint is written.
            wait_for(lambda: subprocess.run(remount, check=False, capture_output=True).returncode == 0, 10)
            code, _ = wait_for_exit(group, program, 30)
            assert newest(folder)["global_step"] >= 10
        finally:
            subprocess.run(["umount", "-l", checkpoints], check=True)
    assert code == 2, read_errors(program)
    assert "Read-only file system" in read_errors(program)
    assert "Traceback" not in read_errors(program)


@pytest.mark.needs("mounts")
def test_a_read_only_folder_is_rejected_at_the_start(program: Program, trained: Path) -> None:
    checkpoints = trained / "checkpoints"
    subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", checkpoints], check=True)
        done = program("--resume", trained)
    finally:
        subprocess.run(["umount", "-l", checkpoints], check=True)
    assert done.code == 2
    assert "cannot be written: Read-only file system" in done.err


def test_the_save_after_a_killed_save_leaves_no_temporary_file(trained: Path) -> None:
    """The killed save had linked the last checkpoint to its older name."""
    before, checkpoints = newest(trained)["global_step"], trained / "checkpoints"
    (checkpoints / f"step-{before:08d}.ckpt").unlink(missing_ok=True)
    os.link(checkpoints / "last.ckpt", checkpoints / f"step-{before:08d}.ckpt")
    saving(trained, before + 1, is_best=False)()
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["best.ckpt", "last.ckpt", f"step-{before:08d}.ckpt"]
    assert read_checkpoint(checkpoints / f"step-{before:08d}.ckpt")["global_step"] == before


def test_without_hard_links_a_copy_is_created(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    before = newest(trained)["global_step"]
    saving(trained, before + 1, is_best=True)()
    # The run may have been killed during a save, which leaves a temporary file.
    names = sorted(path.name for path in (trained / "checkpoints").glob("*.ckpt"))
    assert names == ["best.ckpt", "last.ckpt", f"step-{before:08d}.ckpt"]
    assert newest(trained)["global_step"] == before + 1


def test_a_user_s_own_files_beside_the_checkpoints_stay(trained: Path) -> None:
    checkpoints, own = trained / "checkpoints", {"step-00000005-good.ckpt", "step-5.ckpt", "step-000000005.ckpt"}
    for name in own:
        shutil.copy(checkpoints / "best.ckpt", checkpoints / name)
    before = newest(trained)["global_step"]
    for step in (before + 1, before + 2):
        saving(trained, step, is_best=False)()
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"best.ckpt", "last.ckpt", f"step-{before + 1:08d}.ckpt", *own}


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure, unlike a kill, loses what was not flushed: the content before its name, and then the name."""
    path, flush, flushed = tmp_path / "text", os.fsync, list[tuple[str, str]]()
    path.write_text("old")

    def noted(descriptor: int) -> None:
        flush(descriptor)
        flushed.append(("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file", path.read_text()))

    monkeypatch.setattr(os, "fsync", noted)
    write_text(path, "new")
    assert flushed == [("file", "old"), ("folder", "new")]
    atomic_link(path, tmp_path / "link")
    assert flushed[2:] == [("folder", "new")]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_in_the_error(
    program: Program, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    done = program(*SMALL, "--run-dir", program.folder / "run")
    assert done.code == 2, done.out + done.err
    assert f"cannot be locked: {os.strerror(code)}" in done.err
    assert "on another file system" in done.err
    assert "in use" not in done.err
    with pytest.raises(OSError, match=os.strerror(code)), locked_folder(program.folder):
        pytest.fail("the folder is not locked")


def test_a_file_system_without_fsync_of_folders_causes_one_warning(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, code = os.fsync, errno.EINVAL

    def of_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    folder = program.folder / "run"
    done = program(*SMALL, "--max-steps", 3, "--save-every", 1, "--devices", 2, "--run-dir", folder)
    assert done.code == 0, done.out + done.err
    assert (done.out + done.err).count("fsync of the folder") == 1
    assert newest(folder)["global_step"] == 3
    # An error of a failing disk is different.
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_text(program.folder / "text", "text")


def test_a_checkpoint_of_another_format_is_named(program: Program, trained: Path) -> None:
    content = newest(trained)
    content["lit_mnist"]["format"] = 1
    shutil.rmtree(trained / "checkpoints")
    (trained / "checkpoints").mkdir()
    CheckpointFolder(trained / "checkpoints", keep=1).put(
        partial(write_checkpoint, checkpoint=content), 24, is_best=False
    )
    done = program("--resume", trained)
    assert done.code == 2
    assert "has format 1, but this version reads the formats 2 and 3" in done.out + done.err
