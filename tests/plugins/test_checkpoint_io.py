"""A checkpoint of any module is whole, verified and free of code; the training does not wait for the disk."""

from __future__ import annotations

import collections
import enum
import errno
import logging
import multiprocessing
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_forked
from faults.hostile import CHECKPOINTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from ranks import results_of_ranks, stock_trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.checkpoint import file_hash, serialization
from lit_mnist.checkpoint import format as checkpoint_format
from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.module import LitClassifier
from lit_mnist.plugins import ExactCheckpoint, VerifiedCheckpointIO, checkpoint_io

CONTENT = {"state_dict": {"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(3)}, "epoch": 2, "lr": 0.1}


@dataclass
class Settings:
    name: str


class Color(enum.Enum):
    RED = 1


def test_a_file_of_the_plugin_is_one_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.ckpt"
    plugin = VerifiedCheckpointIO()
    plugin.save_checkpoint(CONTENT, path)
    plugin.teardown()
    for loaded in (
        VerifiedCheckpointIO().load_checkpoint(path),
        TorchCheckpointIO().load_checkpoint(path, weights_only=True),
        torch.load(path, weights_only=True, mmap=True),
        read_checkpoint(path),
    ):
        assert loaded.keys() == CONTENT.keys()
        assert torch.equal(loaded["state_dict"]["w"], CONTENT["state_dict"]["w"])  # type: ignore[index]
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.data())
def test_a_flipped_bit_or_a_missing_end_is_found(tmp_path: Path, data: st.DataObject) -> None:
    path, plugin = tmp_path / "a.ckpt", VerifiedCheckpointIO(background=False)
    plugin.save_checkpoint(CONTENT, path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.ckpt is damaged"):
        plugin.load_checkpoint(path)


def test_a_flipped_bit_is_not_found_in_a_stock_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    TorchCheckpointIO().save_checkpoint(CONTENT, path)
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(11).tobytes())] ^= 1
    path.write_bytes(content)
    loaded = TorchCheckpointIO().load_checkpoint(path, weights_only=True)
    assert not torch.equal(loaded["state_dict"]["w"], CONTENT["state_dict"]["w"])  # type: ignore[index]
    # It can be loaded, with one warning.
    plugin = VerifiedCheckpointIO()
    with pytest.warns(UserWarning, match=r"a\.ckpt has no SHA-256: it was loaded, but not verified"):
        plugin.load_checkpoint(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.load_checkpoint(path)


TAGGED = torch.ones(2)
TAGGED.tag = "of a user"  # type: ignore[attr-defined]
ACCEPTED = [
    collections.OrderedDict(a=1), collections.Counter("aab"), {1, 2}, b"bytes", bytearray(b"x"), 1 + 2j, 10**30,
    torch.float16, torch.device("cpu"), torch.Size([2]), torch.nn.Parameter(torch.ones(2)), torch.strided,
    torch.ones(2, dtype=torch.bfloat16), torch.eye(2).to_sparse(), (1, [None, True]), torch.empty(0),
    {(1, "a"): 1, None: 2, 1.5: 3, True: 4}, torch.ones(2, dtype=torch.complex64).conj(),
    torch.ones(2, dtype=torch.uint16), torch.ones(2).to(torch.float8_e5m2), TAGGED, {torch.float16: torch.int8},
]  # fmt: skip
REJECTED = [
    (collections.defaultdict(int, a=1), "checkpoint['v'] is a collections.defaultdict"),
    ({"list": [0, np.float64(1)]}, "checkpoint['v']['list'][1] is a numpy.float64"),
    (np.zeros(3), "checkpoint['v'] is a numpy.ndarray"),
    ((Color.RED,), "checkpoint['v'][0] is a test_checkpoint_io.Color"),
    (Path("x"), "checkpoint['v'] is a pathlib.PosixPath"),
    (Settings("a"), "checkpoint['v'] is a test_checkpoint_io.Settings"),
    ({Color.RED: 1}, "A key of checkpoint['v'] is a test_checkpoint_io.Color"),
    (lambda: 1, "checkpoint['v'] is a builtins.function"),
    (torch.nn.Linear(1, 1), "checkpoint['v'] is a torch.nn.modules.linear.Linear"),
    (frozenset([1]), "checkpoint['v'] is a builtins.frozenset"),
]


@pytest.mark.parametrize("value", ACCEPTED, ids=lambda value: type(value).__name__)
def test_what_weights_only_can_load_is_saved(tmp_path: Path, value: Any) -> None:
    plugin = VerifiedCheckpointIO(background=False)
    plugin.save_checkpoint({"v": value}, tmp_path / "a.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")["v"]
    assert type(loaded) is type(value)
    assert str(loaded) == str(value)


@pytest.mark.parametrize(("value", "message"), REJECTED, ids=lambda value: type(value).__name__)
def test_what_weights_only_cannot_load_is_rejected_at_the_save(tmp_path: Path, value: Any, message: str) -> None:
    plugin, path = VerifiedCheckpointIO(), tmp_path / "a.ckpt"
    plugin.save_checkpoint(CONTENT, path)
    plugin.wait()
    before = path.read_bytes()
    with pytest.raises(InputError) as error:
        plugin.save_checkpoint({**CONTENT, "v": value}, path)
    assert message in str(error.value)
    assert "add_safe_globals" in str(error.value)
    plugin.teardown()
    assert path.read_bytes() == before


def test_a_class_that_is_allowed_is_saved_and_loaded(tmp_path: Path) -> None:
    plugin = VerifiedCheckpointIO(background=False)
    with torch.serialization.safe_globals([Settings, Color]):
        plugin.save_checkpoint({"v": [Settings("a"), Color.RED]}, tmp_path / "a.ckpt")
        assert plugin.load_checkpoint(tmp_path / "a.ckpt")["v"] == [Settings("a"), Color.RED]
    with pytest.raises(InputError, match=r"needs test_checkpoint_io\.Color, test_checkpoint_io\.Settings, which"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("name", ["os.system", "bytearray of a terabyte", "a tensor many times", "a zip bomb"])
def test_a_hostile_file_is_rejected(tmp_path: Path, name: str) -> None:
    CHECKPOINTS[name](tmp_path / "a.ckpt")
    with pytest.raises(InputError, match=r"a\.ckpt cannot be loaded"):
        VerifiedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


def test_wrong_use_is_rejected(tmp_path: Path) -> None:
    plugin = VerifiedCheckpointIO()
    for message, work in (
        ("always loads with weights_only=True", lambda: plugin.load_checkpoint("a.ckpt", weights_only=False)),
        ("There is no checkpoint at", lambda: plugin.load_checkpoint(tmp_path)),
        ("local file systems", lambda: plugin.save_checkpoint({}, "s3://bucket/a.ckpt")),
        ("no storage_options", lambda: plugin.save_checkpoint({}, "a.ckpt", storage_options={})),
    ):
        with pytest.raises(InputError, match=message):
            work()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The disk is full while the list is not empty."""
    full: list[bool] = []

    def hashed(content: memoryview) -> list[Any]:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return file_hash.hashed_file(content)

    monkeypatch.setattr(checkpoint_format, "hashed_file", hashed)
    return full


def test_a_full_disk_is_reported_at_the_next_save_and_removes_nothing(
    tmp_path: Path, full_disk: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    plugin, old, new = VerifiedCheckpointIO(), tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    plugin.save_checkpoint(CONTENT, old)
    plugin.wait()
    full_disk.append(True)
    with caplog.at_level(logging.ERROR, "lightning.pytorch"):
        plugin.save_checkpoint(CONTENT, new)
        plugin.remove_checkpoint(old)
        with pytest.raises(InputError, match=r"new\.ckpt cannot be written: No space left on device"):
            plugin.save_checkpoint(CONTENT, new)
    assert "No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    # With space, it continues.
    full_disk.clear()
    plugin.save_checkpoint(CONTENT, new)
    plugin.remove_checkpoint(old)
    plugin.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["new.ckpt"]
    full_disk.append(True)
    plugin.save_checkpoint(CONTENT, old)
    with pytest.raises(InputError, match="No space left"):
        plugin.teardown()
    # After the end of a fit, a save is complete when it returns.
    with pytest.raises(InputError, match="No space left"):
        plugin.save_checkpoint(CONTENT, old)
    full_disk.clear()
    plugin.save_checkpoint(CONTENT, old)
    assert old.exists()


def test_a_forked_process_does_not_wait_for_the_writer_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank that `ddp_fork` starts while a file is being written."""
    may_write, write = threading.Event(), checkpoint_io._write

    def wait_and_write(path: Path, content: Any) -> None:
        may_write.wait(60)
        write(path, content)

    monkeypatch.setattr(checkpoint_io, "_write", wait_and_write)
    plugin = VerifiedCheckpointIO()
    plugin.save_checkpoint({"by": "parent"}, tmp_path / "parent.ckpt")

    def child() -> None:
        plugin.wait()
        may_write.set()
        plugin.save_checkpoint({"by": "child"}, tmp_path / "child.ckpt")
        plugin.teardown()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0
    may_write.set()
    plugin.teardown()
    assert [plugin.load_checkpoint(tmp_path / f"{name}.ckpt") for name in ("parent", "child")] == [
        {"by": "parent"},
        {"by": "child"},
    ]


def test_the_error_of_a_training_is_not_hidden_by_that_of_the_writer(tmp_path: Path, full_disk: list[bool]) -> None:
    plugin = VerifiedCheckpointIO()
    full_disk.append(True)
    plugin.save_checkpoint(CONTENT, tmp_path / "a.ckpt")

    def train() -> None:
        try:
            raise RuntimeError("of the training")
        except RuntimeError:
            plugin.teardown()
            raise

    with pytest.raises(RuntimeError, match="of the training"):
        train()


def test_the_kernel_s_own_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """As on a file system where a file cannot grow."""

    def work() -> int:
        import resource
        import signal

        plugin, path = VerifiedCheckpointIO(background=False), tmp_path / "a.ckpt"
        plugin.save_checkpoint(CONTENT, path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(InputError, match=r"File too large.*The file that was there remains"):
            plugin.save_checkpoint({"w": torch.zeros(100_000)}, path)
        assert torch.equal(plugin.load_checkpoint(path)["state_dict"]["n"], torch.tensor(3))
        assert list(tmp_path.glob("*.ckpt*")) == [path]
        assert not list(tmp_path.glob(".*.tmp"))
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.err


def test_a_training_does_not_wait_for_the_disk_and_saves_what_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(content: memoryview) -> list[Any]:
        time.sleep(0.5)
        return file_hash.hashed_file(content)

    monkeypatch.setattr(checkpoint_format, "hashed_file", slowly)
    plugin, weight, seen = VerifiedCheckpointIO(), torch.zeros(3), [1]
    begin = time.monotonic()
    plugin.save_checkpoint({"w": weight, "seen": seen}, tmp_path / "a.ckpt")
    assert time.monotonic() - begin < 0.4
    weight += 1
    seen.append(2)
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert loaded["seen"] == [1]
    assert torch.equal(loaded["w"], torch.zeros(3))
    plugin.teardown()


class Net(LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_serves_any_model_checkpoint_of_a_stock_trainer(tmp_path: Path, world_size: int) -> None:
    def work(rank: Rank) -> list[str]:
        loader = DataLoader(TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0))), 4)
        kept = ModelCheckpoint(tmp_path / "kept", "{step}", monitor="loss", save_top_k=2, every_n_train_steps=1)
        last = ModelCheckpoint(tmp_path / "last", save_last=True, every_n_train_steps=3, save_top_k=0)
        options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [VerifiedCheckpointIO()]}
        trainer = stock_trainer(rank.world_size, tmp_path, max_epochs=2, callbacks=[kept, last], **options)
        trainer.fit(Net(), loader)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        end = VerifiedCheckpointIO().load_checkpoint(tmp_path / "end.ckpt")
        resumed = stock_trainer(rank.world_size, tmp_path, max_epochs=3, plugins=[VerifiedCheckpointIO()])
        resumed.fit(Net(), loader, ckpt_path=tmp_path / "end.ckpt")
        assert resumed.global_step == end["global_step"] * 3 // 2
        loaded = Net.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
        assert all(torch.equal(value, end["state_dict"][name]) for name, value in loaded.state_dict().items())
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*.ckpt"))

    for found in results_of_ranks(work, tmp_path / "ranks", world_size):
        assert len(found) == 3
        assert found[-1] == "last/last.ckpt"


class Milestones(Net):
    """Its schedule has a Counter."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20])]


@pytest.mark.parametrize("module", [Net, Milestones])
def test_checkpoints_of_one_structure_are_checked_once(
    module: type[Net], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check whether a file can be loaded again takes longer than torch.save."""
    checked: list[Any] = []
    original = serialization.check_archive
    monkeypatch.setattr(serialization, "check_archive", lambda file: (checked.append(1), original(file)))
    loader = DataLoader(TensorDataset(torch.randn(200, 4)), 4)
    exact, every = ExactCheckpoint(tmp_path / "exact", 1), ModelCheckpoint(tmp_path, every_n_train_steps=1)
    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [VerifiedCheckpointIO()]}
    stock_trainer(1, tmp_path, max_steps=40, callbacks=[exact, every], **options).fit(module(), loader)
    # Each of the two callbacks has a structure of its own, and another one at the end.
    assert len(checked) <= 4


def test_a_checkpoint_of_the_template_is_verified_when_it_is_loaded(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    module = LitClassifier(seed=3)
    trainer = stock_trainer(1, tmp_path, plugins=[VerifiedCheckpointIO()])
    trainer.strategy.connect(module)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    trainer.strategy.checkpoint_io.teardown()
    LitClassifier.load_from_checkpoint(path)
    assert not [warning for warning in recwarn if "SHA-256" in str(warning.message)]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        LitClassifier.load_from_checkpoint(path)


def test_a_rejected_value_of_a_callback_is_named(tmp_path: Path) -> None:
    class Stateful(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"rng": np.random.default_rng(0)}

    def work() -> int:
        trainer = stock_trainer(1, tmp_path, max_steps=1, callbacks=[Stateful()], plugins=[VerifiedCheckpointIO()])
        trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(4, 4)), 4))
        with pytest.raises(InputError, match=r"\['callbacks'\]\['.*Stateful'\]\['rng'\] is a numpy"):
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        return 0

    assert run_forked(work, tmp_path).code == 0
