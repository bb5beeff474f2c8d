"""The relatives of MNIST: downloaded once per machine, and read from small files in the published formats."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CHILD_ENV, TIMEOUT, as_nobody, assert_same
from mirror import Mirror
from torchvision import datasets

from lit_mnist.data.dataset import Dataset, class_names, load_dataset
from lit_mnist.data.digits import family
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings

SIZES = (5, 3)
CLASSES = {
    "fashion_mnist": datasets.FashionMNIST,
    "kmnist": datasets.KMNIST,
    "qmnist": datasets.QMNIST,
    "emnist": datasets.EMNIST,
}
FASHION = [name for name, _ in datasets.FashionMNIST.resources]


def load(name: str, root: Path | None = None, split: Any = "balanced") -> Dataset:
    kind: Any = name
    return load_dataset(DataSettings(name=kind, root=str(root) if root else None, emnist_split=split))


def idx(array: np.ndarray) -> bytes:
    code = {"u1": 8, "i4": 12, "f4": 13}[array.dtype.str[1:]]
    header = struct.pack(f">{array.ndim + 1}I", code << 8 | array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def small_split(name: str, count: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 3 + first).astype(np.uint8)
    if name == "qmnist":
        table = rng.integers(100, 1 << 20, (count, 8), dtype=np.int32)
        table[:, 0] = labels
        return images, table
    return images, labels


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, bytes]]:
    """Creates small archives of a data set, sets their MD5 sums in torchvision, and returns them by name."""

    def make(name: str, split: str = "balanced", first: int = 0) -> dict[str, bytes]:
        cls = CLASSES[name]
        contents = [idx(array) for count in SIZES for array in small_split(name, count, first)]
        if name == "emnist":
            with tempfile.TemporaryFile() as file:
                with zipfile.ZipFile(file, "w") as archive:
                    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
                    stems = [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in kinds]
                    for stem, content in zip(stems, contents, strict=True):
                        archive.writestr(f"gzip/{stem}.gz", gzip.compress(content))
                file.seek(0)
                packed = file.read()
            monkeypatch.setattr(cls, "md5", hashlib.md5(packed).hexdigest())  # noqa: S324
            return {"gzip.zip": packed}
        grouped = cls.resources if name == "qmnist" else {"": cls.resources}
        addresses = [address for part in ("train", "test", "") for address, _ in grouped.get(part, [])]
        archives = dict(zip(addresses, map(gzip.compress, contents), strict=True))
        sums = [(address, hashlib.md5(archives[address]).hexdigest()) for address in addresses]  # noqa: S324
        monkeypatch.setattr(cls, "resources", {"train": sums[:2], "test": sums[2:]} if name == "qmnist" else sums)
        return {address.rpartition("/")[2]: archive for address, archive in archives.items()}

    return make


def place(root: Path, name: str, files: dict[str, bytes]) -> Path:
    folder = root / CLASSES[name].__name__ / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


MEMBERS = [("fashion_mnist", ""), ("kmnist", ""), ("qmnist", ""), ("emnist", "balanced"), ("emnist", "letters")]


@pytest.mark.parametrize(("name", "split"), MEMBERS)
def test_family_is_read_from_its_archives(
    name: str, split: str, tmp_path: Path, publish: Callable[..., dict[str, bytes]]
) -> None:
    first = int(split == "letters")
    folder = place(tmp_path, name, publish(name, split, first))
    data = load(name, tmp_path, split or "balanced")
    assert data.source == str(folder.parent)
    digest = hashlib.sha256()
    for part, count in ((data.train, SIZES[0]), (data.test, SIZES[1])):
        stored, _ = small_split(name, count, first)
        upright = stored.transpose(0, 2, 1) if name == "emnist" else stored
        assert np.array_equal(part.images.numpy(), upright)
        assert part.images.is_contiguous()
        assert part.labels.dtype == torch.int64
        assert part.labels.tolist() == [0, 1, 2, 0, 1][:count]
        digest.update(upright.tobytes() + part.labels.numpy().tobytes())
    assert data.sha256 == digest.hexdigest()
    assert data.class_names == class_names(DataSettings(name=name, emnist_split=split or "balanced"))

    # The same folder serves torchvision's own class.
    options = {"split": split} if name == "emnist" else {}
    theirs = CLASSES[name](tmp_path, train=True, **options)
    assert [int(theirs[i][1]) - first for i in range(len(theirs))] == data.train.labels.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".download.lock", folder.parent.name]


@pytest.mark.parametrize(
    ("position", "content", "found"),
    [
        (0, idx(np.zeros((5, 28, 28), np.uint8))[:-1], "FashionMNIST cannot be read .*Remove it"),
        (0, idx(np.zeros((4, 28, 28), np.uint8)), "FashionMNIST is damaged: its images .4, 28, 28. and 5 labels"),
        (0, idx(np.zeros((5, 14, 56), np.uint8)), "FashionMNIST is damaged: its images .5, 14, 56."),
        (1, b"", "FashionMNIST cannot be read"),
        (1, idx(np.full(5, 10, np.uint8)), "5 labels from 10 to 10 are not 10 classes from 0"),
    ],
)
def test_damaged_files_are_rejected(
    tmp_path: Path, publish: Callable[..., dict[str, bytes]], position: int, content: bytes, found: str
) -> None:
    files = {Path(name).stem: gzip.decompress(packed) for name, packed in publish("fashion_mnist").items()}
    files[Path(FASHION[position]).stem] = content
    place(tmp_path, "fashion_mnist", files)
    with pytest.raises(InputError, match=found):
        load("fashion_mnist", tmp_path)


def test_emnist_letters_that_start_at_0_are_rejected(tmp_path: Path, publish: Callable[..., dict[str, bytes]]) -> None:
    place(tmp_path, "emnist", publish("emnist", "letters", first=0))
    with pytest.raises(InputError, match="labels from -1 to 1 are not 26 classes from 0"):
        load("emnist", tmp_path, "letters")


@pytest.fixture
def mirror(publish: Callable[..., dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A mirror of a small Fashion-MNIST, the only one that torchvision knows of."""
    server = Mirror(publish("fashion_mnist"))
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [server.address])
    monkeypatch.setenv("no_proxy", "*")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.resume.set()
    server.shutdown()
    thread.join(TIMEOUT)
    server.server_close()
    assert not thread.is_alive()


LOADER = """
import json, sys, threading
from pathlib import Path
from torchvision import datasets
from lit_mnist.data.dataset import load_dataset
from lit_mnist.experiment import DataSettings
root, address, resources = sys.argv[1:]
datasets.FashionMNIST.mirrors = [address]
datasets.FashionMNIST.resources = json.loads(resources)
print(load_dataset(DataSettings(name="fashion_mnist", root=root)).sha256, threading.active_count())
"""


@contextmanager
def loader(root: Path, mirror: Mirror) -> Iterator[subprocess.Popen[str]]:
    arguments = [str(root), mirror.address, json.dumps(datasets.FashionMNIST.resources)]
    process = subprocess.Popen(
        [sys.executable, "-c", LOADER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=CHILD_ENV,
    )
    # A read of a silent process has no timeout of its own.
    watchdog = threading.Timer(TIMEOUT, process.kill)
    watchdog.start()
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        watchdog.cancel()
        watchdog.join()


@pytest.mark.slow
def test_two_processes_download_once_and_keep_no_thread(tmp_path: Path, mirror: Mirror) -> None:
    with loader(tmp_path, mirror) as first, loader_waiting(tmp_path, mirror) as second:
        mirror.resume.set()
        outputs = [process.communicate(timeout=TIMEOUT) for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{load('fashion_mnist', tmp_path).sha256} 1\n"
    # torchvision asks for the redirects of an address before.
    assert {mirror.requested.count(name) for name in FASHION} <= {1, 2}
    # The second process has printed its message once, before.
    assert "Waiting" not in outputs[0][1] + outputs[1][1]


@contextmanager
def loader_waiting(root: Path, mirror: Mirror) -> Iterator[subprocess.Popen[str]]:
    """Starts a process while another one is downloading, and yields it once it has said that it waits."""
    assert mirror.started.wait(TIMEOUT)
    with loader(root, mirror) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"Waiting for another process to download data into {root}.\n"
        yield process


def test_partial_files_of_a_killed_download_are_not_used(tmp_path: Path, mirror: Mirror) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    with loader(tmp_path, mirror) as process:
        assert mirror.started.wait(TIMEOUT)
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT)
    assert not folder.exists()
    mirror.resume.set()
    data = load("fashion_mnist", tmp_path)
    assert np.array_equal(data.train.images.numpy(), small_split("fashion_mnist", SIZES[0], 0)[0])
    assert set(FASHION) < {path.name for path in folder.iterdir()}
    assert not (tmp_path / ".partial").exists()


def test_next_load_needs_no_network(tmp_path: Path, mirror: Mirror) -> None:
    mirror.resume.set()
    data = load("fashion_mnist", tmp_path)
    mirror.files.clear()
    mirror.requested.clear()
    assert_same(load("fashion_mnist", tmp_path), data)
    assert not mirror.requested


def test_wrong_download_is_rejected_and_deleted(tmp_path: Path, mirror: Mirror) -> None:
    mirror.resume.set()
    valid = mirror.files[FASHION[1]]
    mirror.files[FASHION[1]] = b"<html>Please log in</html>"
    with pytest.raises(InputError, match=f"cannot be downloaded to {tmp_path}.*corrupted"):
        load("fashion_mnist", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".download.lock"]
    mirror.files[FASHION[1]] = valid
    assert len(load("fashion_mnist", tmp_path).train) == SIZES[0]


def test_silent_network_times_out(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "NETWORK_TIMEOUT", 0.2)
    with pytest.raises(InputError, match=r"fashion_mnist cannot be downloaded .*timed out"):
        load("fashion_mnist", tmp_path)


def test_message_without_network_explains_the_manual_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # RFC 6761: no name below .invalid is ever resolved.
    monkeypatch.setattr(datasets.KMNIST, "mirrors", ["http://kmnist.invalid/"])
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "lit_mnist" / "KMNIST" / "raw"
    with pytest.raises(
        InputError, match=f"kmnist cannot be downloaded .*kmnist.invalid.*put torchvision's files into {folder}"
    ):
        load("kmnist", None)
    assert not folder.exists()


@pytest.mark.usefixtures("embedded")
def test_message_names_a_folder_that_cannot_be_written(
    open_folder: Path, publish: Callable[..., dict[str, bytes]]
) -> None:
    files = publish("fashion_mnist")
    open_folder.chmod(0o555)
    with as_nobody(), pytest.raises(InputError, match=f"cannot be downloaded to {open_folder}.*data.root"):
        load("fashion_mnist", open_folder)
    open_folder.chmod(0o755)
    in_the_way = open_folder / "file"
    in_the_way.write_text("")
    with pytest.raises(InputError, match=f"cannot be downloaded to {in_the_way}.*data.root"):
        load("fashion_mnist", in_the_way)
    # What is there already needs no permission to write.
    place(open_folder, "fashion_mnist", {Path(name).stem: gzip.decompress(packed) for name, packed in files.items()})
    with as_nobody():
        assert len(load("fashion_mnist", open_folder).train) == SIZES[0]
