"""A checkpoint is whole or not there, verified, and executes nothing."""

import io
import os
import pickle
import random
import resource
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import CONTEXT
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_mnist.errors import InputError
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.timeout(60)


def checkpoint(step: int = 0, count: int = 1000) -> dict[str, Any]:
    return {"step": step, "rest": [1, "x", None, b"2"], "state_dict": {"weight": torch.full((count,), float(step))}}


def is_whole(path: Path) -> bool:
    content = read_checkpoint(path)
    return bool((content["state_dict"]["weight"] == content["step"]).all())


def test_every_reader_accepts_the_file(tmp_path) -> None:
    path = tmp_path / "new" / "a.ckpt"
    write_checkpoint(checkpoint(3), path)
    for content in (read_checkpoint(path), torch.load(path), torch.load(path, mmap=True, weights_only=True)):
        assert torch.equal(content.pop("state_dict")["weight"], torch.full((1000,), 3.0))
        assert content == {"step": 3, "rest": [1, "x", None, b"2"]}
    assert zipfile.ZipFile(path).testzip() is None
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_a_file_of_torch_is_loaded_without_verification(tmp_path) -> None:
    torch.save(checkpoint(4), tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt")["step"] == 4


def test_a_trainer_uses_it(tmp_path) -> None:
    def fit(epochs: int, path: Path | None = None) -> tuple[LightningModule, Trainer]:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            limit_train_batches=2,
            limit_val_batches=0,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            plugins=[VerifiedCheckpointIO()],
        )
        module = BoringModel()
        trainer.fit(module, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module, trainer

    fit(1)
    module, trainer = fit(2, tmp_path / "1.ckpt")
    assert trainer.global_step == 4
    loaded = BoringModel.load_from_checkpoint(tmp_path / "2.ckpt")
    torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)
    trainer.strategy.remove_checkpoint(tmp_path / "2.ckpt")
    assert not (tmp_path / "2.ckpt").exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [(np.zeros(2), "numpy"), (Path("x"), "pathlib"), (torch.nn.Linear(1, 1), "Linear"), (lambda: 1, "lambda")],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value, name) -> None:
    write_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(InputError, match=name) as caught:
        write_checkpoint({**checkpoint(2), "hyper_parameters": {"it": value}}, tmp_path / "a.ckpt")
    assert "'hyper_parameters'" in str(caught.value)
    assert read_checkpoint(tmp_path / "a.ckpt")["step"] == 1


# --- 22: a save that is killed


def started(function: Callable[..., None], *arguments: Any) -> Any:
    process = CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def save_until(path: Path, place: str) -> None:
    """Saves, and is killed by SIGKILL at a place of the write."""

    def die(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Path if place == "replace" else os, place, die)
    write_checkpoint(checkpoint(2), path)


def save_forever(path: Path) -> None:
    step, parent = 2, os.getppid()
    while os.getppid() == parent:
        write_checkpoint(checkpoint(step, 100_000), path)
        step += 1


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_save_that_is_killed_leaves_the_earlier_file(tmp_path, place) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(checkpoint(1), path)
    process = started(save_until, path, place)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read_checkpoint(path)["step"] == 1
    write_checkpoint(checkpoint(3), path)
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_save_that_is_killed_at_any_time_leaves_a_valid_file(tmp_path, kills) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(checkpoint(1), path)
    generator = random.Random(kills)
    for _ in range(kills):
        before = path.read_bytes()
        process = started(save_forever, path)
        while path.read_bytes() == before:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        process.join()
        assert is_whole(path)


# --- 23: damaged and hostile files


def test_damaged_files_are_rejected(tmp_path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(checkpoint(1), path)
    content = path.read_bytes()
    generator = random.Random(0)
    places = [*range(-93, 0, 4), *(generator.randrange(len(content)) for _ in range(60))]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_checkpoint(path)
    for length in [0, 1, 21, 22, *(generator.randrange(len(content)) for _ in range(30)), *range(-93, -1)]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError):
            read_checkpoint(path)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch executed",)


def zip_with(content: bytes) -> bytes:
    """Returns a checkpoint whose pickle is replaced."""
    buffer, result = io.BytesIO(), io.BytesIO()
    torch.save(checkpoint(), buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return result.getvalue()


def hostile_files() -> list[bytes]:
    buffer = io.BytesIO()
    torch.save({"state_dict": Hostile()}, buffer)
    plain = pickle.dumps({"state_dict": Hostile()}, protocol=2)
    legacy = io.BytesIO()
    torch.save({"state_dict": Hostile()}, legacy, _use_new_zipfile_serialization=False)
    return [
        buffer.getvalue(),
        plain,
        legacy.getvalue(),
        zip_with(plain),
        zip_with(b"cos\nsystem\n(S'touch executed'\ntR."),
    ]


@pytest.mark.parametrize("index", range(5))
def test_hostile_files_execute_nothing(tmp_path, index) -> None:
    (tmp_path / "a.ckpt").write_bytes(hostile_files()[index])
    with pytest.raises(InputError):
        read_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "executed").exists()


# --- 24: a full disk


def save_on_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(InputError, match=r"a\.ckpt cannot be written"):
        write_checkpoint(checkpoint(2, 100_000), path)


def test_a_full_disk_keeps_the_earlier_file(tmp_path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(checkpoint(1), path)
    process = started(save_on_full_disk, path)
    process.join()
    assert process.exitcode == 0
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert read_checkpoint(path)["step"] == 1
