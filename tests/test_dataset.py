"""The data are the official bytes or nothing: every damage is one message, and no process is harmed by loading."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets

from lit_mnist.data import family, fetch, mnist
from lit_mnist.data.dataset import Dataset, class_names, load_dataset
from lit_mnist.errors import InputError

TIMEOUT = 120
NOBODY = 65534
REPOSITORY = Path(__file__).parents[1]
NAMES = [file.name for file in mnist.FILES]
CHILD_ENV = {**os.environ, "PYTHONPATH": str(REPOSITORY), "no_proxy": "*"}


def child(script: str, *args: str, **env: str) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *args]
    environment = {**CHILD_ENV, **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@contextmanager
def as_nobody() -> Iterator[None]:
    """The superuser may read everything, so for a while the tests are somebody else.

    That one may not be able to import: what is needed must have been loaded before, as the fixture `embedded` does.
    """
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def embedded() -> Dataset:
    return load_dataset("mnist", None)


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoded")
    for name in NAMES:
        (folder / name).write_bytes(gzip.decompress((mnist.EMBEDDED / f"{name}.gz").read_bytes()))
    return folder


def link(folder: Path, *files: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of the user's with the four .gz files."""
    return link(tmp_path / "root", *(mnist.EMBEDDED / f"{name}.gz" for name in NAMES))


def assert_same(first: Dataset, second: Dataset) -> None:
    assert first.sha256 == second.sha256
    for a, b in ((first.train, second.train), (first.test, second.test)):
        torch.testing.assert_close(a.images, b.images, rtol=0, atol=0)
        torch.testing.assert_close(a.labels, b.labels, rtol=0, atol=0)


# --- MNIST -----------------------------------------------------------------------------------------------------------


def test_embedded_mnist_is_whole(embedded: Dataset, decoded: Path) -> None:
    assert (embedded.name, embedded.source, embedded.num_classes) == ("mnist", "embedded", 10)
    for split, count in ((embedded.train, 60_000), (embedded.test, 10_000)):
        assert len(split) == count
        assert (split.images.shape, split.images.dtype) == ((count, 28, 28), torch.uint8)
        assert (split.labels.shape, split.labels.dtype) == ((count,), torch.int64)
    assert embedded.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    contents = [(decoded / name).read_bytes() for name in NAMES]
    assert embedded.train.images.numpy().tobytes() == contents[0][16:]
    assert embedded.test.images.numpy().tobytes() == contents[2][16:]
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    assert embedded.sha256 == hashlib.sha256(digests).hexdigest()


def test_readme_states_the_digests_of_the_embedded_files(decoded: Path) -> None:
    readme = (mnist.EMBEDDED / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        packed = (mnist.EMBEDDED / f"{name}.gz").read_bytes()
        plain = (decoded / name).read_bytes()
        assert f"| `{name}.gz` | {len(packed)} | `{hashlib.sha256(packed).hexdigest()}` |" in readme
        assert f"| `{name}`, decoded | {len(plain)} | `{hashlib.sha256(plain).hexdigest()}` |" in readme


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
@pytest.mark.parametrize("form", [".gz", "decoded"])
def test_own_folder(tmp_path: Path, embedded: Dataset, decoded: Path, place: str, form: str) -> None:
    files = [mnist.EMBEDDED / f"{name}.gz" if form == ".gz" else decoded / name for name in NAMES]
    folder = link(tmp_path / place, *files)
    data = load_dataset("mnist", tmp_path)
    assert data.source == f"{folder} ({form})"
    assert_same(data, embedded)


def test_gz_is_preferred_and_a_mixture_is_told(root: Path, embedded: Dataset, decoded: Path) -> None:
    (root / NAMES[1]).write_bytes(b"not what is read")
    assert load_dataset("mnist", root).source == f"{root} (.gz)"
    (root / f"{NAMES[3]}.gz").unlink()
    link(root, decoded / NAMES[3])
    data = load_dataset("mnist", root)
    assert data.source == f"{root} (.gz and decoded)"
    assert_same(data, embedded)


def test_home_is_found_and_memory_files_are_not_needed(
    root: Path, embedded: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert_same(load_dataset("mnist", Path("~/root")), embedded)
    with pytest.raises(InputError, match="~nobody-of-that-name cannot be found"):
        load_dataset("mnist", Path("~nobody-of-that-name"))


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def gz(change: Callable[[bytes], bytes]) -> Callable[[bytes], tuple[str, bytes]]:
    return lambda packed: (".gz", change(packed))


def repacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], tuple[str, bytes]]:
    return lambda packed: (".gz", gzip.compress(change(gzip.decompress(packed)), 1))


def plain(change: Callable[[bytes], bytes]) -> Callable[[bytes], tuple[str, bytes]]:
    return lambda packed: ("", change(gzip.decompress(packed)))


@pytest.mark.parametrize("name", [NAMES[1], NAMES[2], NAMES[3]])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(gz(lambda c: c[: len(c) // 2]), id="truncated gz"),
        pytest.param(gz(lambda c: c[:-1]), id="gz without its last byte"),
        pytest.param(gz(lambda c: flipped(c, len(c) // 2)), id="flipped bit in gz"),
        pytest.param(gz(lambda c: flipped(c, len(c) - 8)), id="flipped bit in the gz checksum"),
        pytest.param(gz(lambda c: b""), id="empty gz"),
        pytest.param(gz(lambda c: c + b"x"), id="garbage after gz"),
        pytest.param(gz(lambda c: b"<html>Not found</html>"), id="no gz"),
        pytest.param(repacked(lambda c: c[:8] + c[-1:] + c[8:-1]), id="other content of the same size"),
        pytest.param(repacked(lambda c: c + b"\0"), id="one byte more"),
        pytest.param(plain(lambda c: flipped(c, len(c) // 2)), id="flipped bit in decoded"),
        pytest.param(plain(lambda c: c[:-1]), id="truncated decoded"),
        pytest.param(plain(lambda c: b""), id="empty decoded"),
        pytest.param(plain(lambda c: c + c), id="decoded twice as long"),
    ],
)
def test_every_damage_is_refused(root: Path, name: str, damage: Callable[[bytes], tuple[str, bytes]]) -> None:
    sound = root / f"{name}.gz"
    suffix, content = damage(sound.read_bytes())
    sound.unlink()
    (root / f"{name}{suffix}").write_bytes(content)
    with pytest.raises(InputError) as refused:
        load_dataset("mnist", root)
    expected = next(file.sha256 for file in mnist.FILES if file.name == name)
    message = str(refused.value)
    assert message.startswith(f"{root / name}{suffix} is not MNIST's {name}: expected ")
    assert f"SHA-256 {expected}, found " in message
    assert message.endswith(
        "Replace it by the official file, or leave data.root unset to use the files of the package."
    )
    assert refused.value.exit_code == 2


def test_swapped_labels_are_refused(root: Path) -> None:
    (root / f"{NAMES[1]}.gz").unlink()
    (root / f"{NAMES[1]}.gz").symlink_to(mnist.EMBEDDED / f"{NAMES[3]}.gz")
    with pytest.raises(InputError, match="found 10008 bytes with SHA-256 ff7bcfd4"):
        load_dataset("mnist", root)


@pytest.mark.parametrize("instead", ["nothing", "folder"])
def test_missing_file_is_named(root: Path, instead: str) -> None:
    (root / f"{NAMES[2]}.gz").unlink()
    if instead == "folder":
        (root / f"{NAMES[2]}.gz").mkdir()
    with pytest.raises(InputError, match=f"{root} lacks {NAMES[2]}[.] Expected .* leave data.root unset"):
        load_dataset("mnist", root)


def test_damage_in_the_package_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / f"{NAMES[0]}.gz").unlink()
    monkeypatch.setattr(mnist, "EMBEDDED", root)
    with pytest.raises(InputError, match=f"{NAMES[0]}.gz .* Reinstall the package"):
        load_dataset("mnist", None)


@pytest.mark.usefixtures("embedded")
def test_unreadable_file_and_folder_are_named(open_folder: Path) -> None:
    for name in NAMES:
        (open_folder / f"{name}.gz").write_bytes((mnist.EMBEDDED / f"{name}.gz").read_bytes())
    (open_folder / f"{NAMES[3]}.gz").chmod(0)
    with as_nobody(), pytest.raises(InputError, match=rf"{NAMES[3]}.gz is not .* \(PermissionError"):
        load_dataset("mnist", open_folder)
    open_folder.chmod(0)
    with as_nobody(), pytest.raises(InputError, match=rf"{open_folder}/{NAMES[0]}.gz cannot be looked up"):
        load_dataset("mnist", open_folder)
    open_folder.chmod(0o755)


def test_stray_processed_files_are_never_read(tmp_path: Path, embedded: Dataset) -> None:
    processed = tmp_path / "MNIST" / "processed"
    processed.mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save((torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)), processed / name)
    with pytest.raises(InputError, match="MNIST is not in"):
        load_dataset("mnist", tmp_path)
    link(tmp_path / "MNIST" / "raw", *(mnist.EMBEDDED / f"{name}.gz" for name in NAMES))
    assert len(datasets.MNIST(tmp_path)) == 1  # torchvision's class does read them
    assert_same(load_dataset("mnist", tmp_path), embedded)


BOMB = """
import json, resource, sys
from pathlib import Path
from lit_mnist.data.dataset import load_dataset
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_dataset("mnist", Path(sys.argv[1]))
except Exception as error:
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"kind": type(error).__name__, "message": str(error), "grown_kib": after - before}))
"""


@pytest.mark.parametrize("form", [".gz", "decoded"])
def test_bomb_fills_neither_memory_nor_disk(root: Path, form: str) -> None:
    packed = root / f"{NAMES[0]}.gz"
    packed.unlink()
    if form == ".gz":
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        block = packer.compress(bytes(64 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
        with packed.open("wb") as file:
            file.write(b"\x1f\x8b\x08\0\0\0\0\0\0\x03")
            for _ in range(64):  # 4 GiB once decoded
                file.write(block)
    else:
        with (root / NAMES[0]).open("wb") as file:
            file.truncate(1 << 40)
    result = child(BOMB, str(root))
    assert result["kind"] == "InputError"
    assert "found more than 47040016 bytes" in result["message"]
    assert result["grown_kib"] < 64 << 10


FORK = """
import json, os, sys, time
import lit_mnist.data.dataset as dataset
early = [name for name in sys.modules if name.split(".")[0] == "torchvision"]
import torch, torchvision.datasets.mnist
def tasks():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(int(sys.argv[1]))
before, files = tasks(), len(os.listdir("/proc/self/fd"))
dataset.load_dataset("mnist", None)
after, left = tasks(), len(os.listdir("/proc/self/fd")) - files
pid = os.fork()
if pid == 0:
    torch.set_num_threads(4)
    total = torch.ones(4_000_000).sum().item()
    os._exit(0 if total == 4_000_000 and tasks() > 1 else 1)
status, deadline = None, time.monotonic() + 60
while status is None and time.monotonic() < deadline:
    done, code = os.waitpid(pid, os.WNOHANG)
    status = os.waitstatus_to_exitcode(code) if done else time.sleep(0.02)
if status is None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
print(json.dumps({"early": early, "before": before, "after": after, "left": left, "child": status,
                  "threads": torch.get_num_threads()}))
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_a_process_that_loaded_may_fork(threads: int) -> None:
    result = child(FORK, str(threads), OMP_NUM_THREADS="4")
    assert result["early"] == []
    assert result["after"] == result["before"]
    assert result["left"] == 0
    assert result["child"] == 0
    assert result["threads"] == threads


# --- Names -----------------------------------------------------------------------------------------------------------


def test_class_names_are_torchvisions() -> None:
    assert class_names("mnist") == class_names("qmnist") == tuple("0123456789")
    assert list(class_names("fashion_mnist")) == datasets.FashionMNIST.classes
    assert list(class_names("kmnist")) == datasets.KMNIST.classes
    for split in datasets.EMNIST.splits:
        known = [name for name in datasets.EMNIST.classes_split_dict[split] if name != "N/A"]
        assert list(class_names("emnist", split)) == known
    assert class_names("emnist") == class_names("emnist", "balanced")


@pytest.mark.parametrize(("name", "split"), [("cifar10", "balanced"), ("emnist", "all")])
def test_unknown_names_are_refused(name: str, split: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is unknown[.] Choose one of .*mnist"):
        class_names(name, split)
    with pytest.raises(InputError, match=r"is unknown[.] Choose one of .*mnist"):
        load_dataset(name, tmp_path, split)
    assert list(tmp_path.iterdir()) == []


# --- The family, on small files in the published formats -------------------------------------------------------------

SIZES = (5, 3)
CLASSES = {
    "fashion_mnist": datasets.FashionMNIST,
    "kmnist": datasets.KMNIST,
    "qmnist": datasets.QMNIST,
    "emnist": datasets.EMNIST,
}
FASHION = [name for name, _ in datasets.FashionMNIST.resources]


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
    """Makes small archives of a data set, tells torchvision their MD5 sums, and returns them by name."""

    def make(name: str, split: str = "balanced", first: int = 0) -> dict[str, bytes]:
        cls = CLASSES[name]
        monkeypatch.setitem(family.COUNTS, f"emnist/{split}" if name == "emnist" else name, SIZES)
        contents = [idx(array) for count in SIZES for array in small_split(name, count, first)]
        if name == "emnist":
            with tempfile.TemporaryFile() as file:
                with zipfile.ZipFile(file, "w") as archive:
                    for stem, content in zip(family._archives(name, split), contents, strict=True):
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
    before = sorted(tmp_path.rglob("*"))
    data = load_dataset(name, tmp_path, split)
    assert data.source == f"{folder} (MD5 verified)"
    assert sorted(tmp_path.rglob("*")) == before  # neither a lock nor an extracted file
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
    assert data.class_names == class_names(name, split)

    # The same folder serves torchvision's own class, which extracts; and what it extracted serves without archives.
    options = {"split": split} if name == "emnist" else {}
    theirs = CLASSES[name](tmp_path, train=True, download=True, **options)
    assert [int(theirs[i][1]) - first for i in range(len(theirs))] == data.train.labels.tolist()
    CLASSES[name](tmp_path, train=False, download=True, **options)
    for archive in [*folder.glob("*.gz"), *folder.glob("*.zip")]:
        archive.unlink()
    again = load_dataset(name, tmp_path, split)
    assert again.source == f"{folder} (only the sizes of extracted files verified)"
    assert_same(again, data)


def test_damaged_archive_is_refused_even_beside_a_sound_extracted_file(
    tmp_path: Path, publish: Callable[..., dict[str, bytes]]
) -> None:
    files = publish("kmnist")
    folder = place(tmp_path, "kmnist", files)
    name, content = next(iter(files.items()))
    (folder / Path(name).stem).write_bytes(gzip.decompress(content))
    (folder / name).write_bytes(flipped(content, 4))  # the time stamp: gzip itself sees no harm in it
    with pytest.raises(
        InputError, match=f"{folder / name} is damaged: expected the MD5 [0-9a-f]{{32}}, found .*Delete"
    ):
        load_dataset("kmnist", tmp_path)


@pytest.mark.parametrize(
    ("position", "content", "found"),
    [
        (0, idx(np.zeros((4, 28, 28), np.uint8)), "found 3152 bytes"),
        (0, idx(np.zeros((6, 28, 28), np.uint8)), "found more than 3936 bytes"),
        (0, idx(np.zeros((5, 14, 56), np.uint8)), r"found items of the shape \(5, 14, 56\)"),
        (1, idx(np.zeros(5, np.uint8))[:7] + b"\x09" + bytes(5), r"found no idx file of the shape \(5,\)"),
        (1, b"\0\0\x09\x01" + idx(np.zeros(5, np.uint8))[4:], r"found no idx file of the shape \(5,\)"),
        (1, idx(np.full(5, 10, np.uint8)), "expected 10 classes from 0, found labels from 10 to 10"),
    ],
)
def test_damaged_extracted_files_are_refused(
    tmp_path: Path, publish: Callable[..., dict[str, bytes]], position: int, content: bytes, found: str
) -> None:
    files = {Path(name).stem: gzip.decompress(packed) for name, packed in publish("fashion_mnist").items()}
    files[Path(FASHION[position]).stem] = content
    place(tmp_path, "fashion_mnist", files)
    with pytest.raises(InputError, match=found):
        load_dataset("fashion_mnist", tmp_path)


def test_table_of_another_type_is_refused(tmp_path: Path, publish: Callable[..., dict[str, bytes]]) -> None:
    files = {Path(name).stem: gzip.decompress(packed) for name, packed in publish("qmnist").items()}
    files["qmnist-test-labels-idx2-int"] = idx(np.zeros((3, 8), np.float32))
    place(tmp_path, "qmnist", files)
    with pytest.raises(InputError, match=r"found items of the shape \(3, 8\) and type torch.float32"):
        load_dataset("qmnist", tmp_path)


def test_emnist_letters_that_start_at_0_are_refused(tmp_path: Path, publish: Callable[..., dict[str, bytes]]) -> None:
    place(tmp_path, "emnist", publish("emnist", "letters", first=0))
    with pytest.raises(InputError, match="expected 26 classes from 0, found labels from -1 to 1"):
        load_dataset("emnist", tmp_path, "letters")


# --- Fetching --------------------------------------------------------------------------------------------------------


class Mirror(http.server.HTTPServer):
    """Serves files on this machine: of the first one only a half until it is told to go on."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.files = files
        self.requested: list[str] = []
        self.started, self.go_on = threading.Event(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class MirrorHandler(http.server.BaseHTTPRequestHandler):
    server: Mirror
    timeout = TIMEOUT

    def do_GET(self) -> None:
        content = self.server.files[self.path[1:]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.headers.get("Method") == "HEAD":  # torchvision's way to ask for redirections
            return
        self.server.requested.append(self.path[1:])
        self.wfile.write(content[: len(content) // 2])
        self.server.started.set()
        self.server.go_on.wait(TIMEOUT)
        self.wfile.write(content[len(content) // 2 :])

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def mirror(publish: Callable[..., dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A mirror of a small Fashion-MNIST, the only one that torchvision knows of."""
    server = Mirror(publish("fashion_mnist"))
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [server.address])
    monkeypatch.setenv("no_proxy", "*")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join(TIMEOUT)
    server.server_close()
    assert not thread.is_alive()


LOADER = """
import json, sys, threading
from pathlib import Path
from torchvision import datasets
from lit_mnist.data import family
from lit_mnist.data.dataset import load_dataset
root, address, resources, counts = sys.argv[1:]
datasets.FashionMNIST.mirrors = [address]
datasets.FashionMNIST.resources = json.loads(resources)
family.COUNTS["fashion_mnist"] = tuple(json.loads(counts))
print(load_dataset("fashion_mnist", Path(root)).sha256, threading.active_count())
"""


@contextmanager
def loader(root: Path, mirror: Mirror) -> Iterator[subprocess.Popen[str]]:
    arguments = [str(root), mirror.address, json.dumps(datasets.FashionMNIST.resources), json.dumps(SIZES)]
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


def test_two_processes_download_once_and_keep_no_thread(tmp_path: Path, mirror: Mirror) -> None:
    with loader(tmp_path, mirror) as first, loader_waiting(tmp_path, mirror) as second:
        mirror.go_on.set()
        outputs = [process.communicate(timeout=TIMEOUT) for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{load_dataset('fashion_mnist', tmp_path).sha256} 1\n"
    assert mirror.requested == FASHION
    assert "Waiting" not in outputs[0][1] + outputs[1][1]  # the second one said so once, before


@contextmanager
def loader_waiting(root: Path, mirror: Mirror) -> Iterator[subprocess.Popen[str]]:
    """Starts a process while another one is downloading, and yields it once it has said that it waits."""
    assert mirror.started.wait(TIMEOUT)
    with loader(root, mirror) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"Waiting for another process to download data into {root}.\n"
        yield process


def test_killed_download_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, mirror: Mirror) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    with loader(tmp_path, mirror) as process:
        assert mirror.started.wait(TIMEOUT)
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT)
    assert [path.name for path in folder.iterdir()] == [".partial"]
    mirror.go_on.set()
    data = load_dataset("fashion_mnist", tmp_path)
    assert np.array_equal(data.train.images.numpy(), small_split("fashion_mnist", SIZES[0], 0)[0])
    assert sorted(path.name for path in folder.iterdir()) == sorted(FASHION)


def test_next_load_needs_no_network(tmp_path: Path, mirror: Mirror) -> None:
    mirror.go_on.set()
    data = load_dataset("fashion_mnist", tmp_path)
    mirror.files.clear()
    assert_same(load_dataset("fashion_mnist", tmp_path), data)
    assert mirror.requested == FASHION


def test_wrong_download_is_refused_and_not_kept(tmp_path: Path, mirror: Mirror) -> None:
    mirror.go_on.set()
    sound = mirror.files[FASHION[1]]
    mirror.files[FASHION[1]] = b"<html>Please log in</html>"
    with pytest.raises(InputError, match=f"{FASHION[1]} could not be fetched .*{mirror.address}.*corrupted"):
        load_dataset("fashion_mnist", tmp_path)
    assert [path.name for path in (tmp_path / "FashionMNIST" / "raw").iterdir()] == [FASHION[0]]
    mirror.files[FASHION[1]] = sound
    assert load_dataset("fashion_mnist", tmp_path).source.endswith("(MD5 verified)")
    assert mirror.requested.count(FASHION[0]) == 1


def test_silent_network_is_given_up(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "NETWORK_TIMEOUT", 0.2)
    with pytest.raises(InputError, match=f"{FASHION[0]} could not be fetched .*timed out"):
        load_dataset("fashion_mnist", tmp_path)
    assert socket.getdefaulttimeout() is None


def test_without_network_the_way_by_hand_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # RFC 6761: no name below .invalid is ever resolved.
    monkeypatch.setattr(datasets.KMNIST, "mirrors", ["http://kmnist.invalid/"])
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "lit_mnist" / "KMNIST" / "raw"
    with pytest.raises(InputError) as refused:
        load_dataset("kmnist", None)
    message = str(refused.value)
    assert message.startswith("train-images-idx3-ubyte.gz could not be fetched (http://kmnist.invalid/train-images")
    assert f"put them, as they are, into {folder}:" in message
    for name in FASHION:
        assert f"\n  http://kmnist.invalid/{name}" in message
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("embedded")
def test_place_that_cannot_be_written_is_named(open_folder: Path, publish: Callable[..., dict[str, bytes]]) -> None:
    files = publish("fashion_mnist")
    open_folder.chmod(0o555)
    with as_nobody(), pytest.raises(InputError, match=f"cannot be kept in {open_folder}.*data.root"):
        load_dataset("fashion_mnist", open_folder)
    open_folder.chmod(0o755)
    in_the_way = open_folder / "file"
    in_the_way.write_text("")
    with pytest.raises(InputError, match=f"cannot be kept in {in_the_way}.*data.root"):
        load_dataset("fashion_mnist", in_the_way)
    # What is there already needs no permission to write.
    folder = place(open_folder, "fashion_mnist", files)
    with as_nobody():
        assert load_dataset("fashion_mnist", open_folder).source.startswith(str(folder))
