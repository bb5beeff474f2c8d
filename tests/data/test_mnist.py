"""MNIST: only the official bytes are accepted, one message reports damage, and the process can fork afterwards."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import as_nobody, assert_same, child, flipped
from torchvision import datasets

from lit_mnist.data.dataset import Dataset, class_names, load_dataset
from lit_mnist.data.digits import mnist
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings

NAMES = [file.name for file in mnist.FILES]


def load(name: str, root: Path | None = None, split: Any = "balanced") -> Dataset:
    kind: Any = name
    return load_dataset(DataSettings(name=kind, root=str(root) if root else None, emnist_split=split))


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


def test_embedded_mnist_is_complete(embedded: Dataset, decoded: Path) -> None:
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
def test_user_folder(tmp_path: Path, embedded: Dataset, decoded: Path, place: str, form: str) -> None:
    files = [mnist.EMBEDDED / f"{name}.gz" if form == ".gz" else decoded / name for name in NAMES]
    folder = link(tmp_path / place, *files)
    data = load("mnist", tmp_path)
    assert data.source == f"{folder} ({form})"
    assert_same(data, embedded)


def test_gz_is_preferred_and_the_source_states_a_mixture(root: Path, embedded: Dataset, decoded: Path) -> None:
    (root / NAMES[1]).write_bytes(b"not what is read")
    assert load("mnist", root).source == f"{root} (.gz)"
    (root / f"{NAMES[3]}.gz").unlink()
    link(root, decoded / NAMES[3])
    data = load("mnist", root)
    assert data.source == f"{root} (.gz and decoded)"
    assert_same(data, embedded)


def test_home_folder_is_expanded(root: Path, embedded: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    assert_same(load("mnist", Path("~/root")), embedded)
    with pytest.raises(InputError, match="~nobody-of-that-name cannot be found"):
        load("mnist", Path("~nobody-of-that-name"))


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
def test_every_damage_is_rejected(root: Path, name: str, damage: Callable[[bytes], tuple[str, bytes]]) -> None:
    valid = root / f"{name}.gz"
    suffix, content = damage(valid.read_bytes())
    valid.unlink()
    (root / f"{name}{suffix}").write_bytes(content)
    with pytest.raises(InputError) as caught:
        load("mnist", root)
    expected = next(file.sha256 for file in mnist.FILES if file.name == name)
    message = str(caught.value)
    assert message.startswith(f"{root / name}{suffix} is not MNIST's {name}: expected ")
    assert f"SHA-256 {expected}, found " in message
    assert message.endswith(
        "Replace it by the official file, or leave data.root unset to use the files of the package."
    )
    assert caught.value.exit_code == 2


def test_swapped_labels_are_rejected(root: Path) -> None:
    (root / f"{NAMES[1]}.gz").unlink()
    (root / f"{NAMES[1]}.gz").symlink_to(mnist.EMBEDDED / f"{NAMES[3]}.gz")
    with pytest.raises(InputError, match="found 10008 bytes with SHA-256 ff7bcfd4"):
        load("mnist", root)


@pytest.mark.parametrize("instead", ["nothing", "folder"])
def test_message_names_a_missing_file(root: Path, instead: str) -> None:
    (root / f"{NAMES[2]}.gz").unlink()
    if instead == "folder":
        (root / f"{NAMES[2]}.gz").mkdir()
    with pytest.raises(InputError, match=f"{root} lacks {NAMES[2]}[.] Expected .* leave data.root unset"):
        load("mnist", root)


def test_damage_in_the_package_is_rejected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / f"{NAMES[0]}.gz").unlink()
    monkeypatch.setattr(mnist, "EMBEDDED", root)
    with pytest.raises(InputError, match=f"{NAMES[0]}.gz .* Reinstall the package"):
        load("mnist")


@pytest.mark.usefixtures("embedded")
def test_message_names_an_unreadable_file_or_folder(open_folder: Path) -> None:
    for name in NAMES:
        (open_folder / f"{name}.gz").write_bytes((mnist.EMBEDDED / f"{name}.gz").read_bytes())
    (open_folder / f"{NAMES[3]}.gz").chmod(0)
    with as_nobody(), pytest.raises(InputError, match=rf"{NAMES[3]}.gz is not .* \(PermissionError"):
        load("mnist", open_folder)
    open_folder.chmod(0)
    with as_nobody(), pytest.raises(InputError, match=rf"{open_folder}/{NAMES[0]}.gz cannot be accessed"):
        load("mnist", open_folder)
    open_folder.chmod(0o755)


def test_stray_processed_files_are_never_read(tmp_path: Path, embedded: Dataset) -> None:
    processed = tmp_path / "MNIST" / "processed"
    processed.mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save((torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)), processed / name)
    with pytest.raises(InputError, match="MNIST is not in"):
        load("mnist", tmp_path)
    link(tmp_path / "MNIST" / "raw", *(mnist.EMBEDDED / f"{name}.gz" for name in NAMES))
    assert len(datasets.MNIST(tmp_path)) == 1  # torchvision's class does read them
    assert_same(load("mnist", tmp_path), embedded)


BOMB = """
import json, resource, sys
from lit_mnist.data.dataset import load_dataset
from lit_mnist.experiment import DataSettings
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_dataset(DataSettings(root=sys.argv[1]))
except Exception as error:
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"kind": type(error).__name__, "message": str(error), "grown_kib": after - before}))
"""


@pytest.mark.parametrize("form", [pytest.param(".gz", marks=pytest.mark.slow), "decoded"])
def test_decompression_bomb_fills_neither_memory_nor_disk(root: Path, form: str) -> None:
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
dataset.load_dataset()
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
@pytest.mark.slow
def test_a_process_can_fork_after_loading(threads: int) -> None:
    result = child(FORK, str(threads), OMP_NUM_THREADS="4")
    assert result["early"] == []
    assert result["after"] == result["before"]
    assert result["left"] == 0
    assert result["child"] == 0
    assert result["threads"] == threads


def test_class_names_match_torchvision() -> None:
    def names(name: Any, split: Any = "balanced") -> list[str]:
        return list(class_names(DataSettings(name=name, emnist_split=split)))

    assert names("mnist") == names("qmnist") == list("0123456789")
    assert names("fashion_mnist") == datasets.FashionMNIST.classes
    assert names("kmnist") == datasets.KMNIST.classes
    for split in datasets.EMNIST.splits:
        assert names("emnist", split) == [name for name in datasets.EMNIST.classes_split_dict[split] if name != "N/A"]


@pytest.mark.parametrize(("name", "split"), [("cifar10", "balanced"), ("emnist", "all")])
def test_unknown_names_are_rejected(name: str, split: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is unknown[.] Choose one of .*mnist"):
        load(name, tmp_path, split)
    assert list(tmp_path.iterdir()) == []
