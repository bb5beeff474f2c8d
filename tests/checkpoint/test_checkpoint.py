"""Checkpoints: written atomically, verified, plain values only, and readable by Lightning."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, flipped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lit_mnist.checkpoint import serialization
from lit_mnist.checkpoint.digest import content_sha256, weights_sha256
from lit_mnist.checkpoint.file_hash import COMMENT_BYTES, hashed_file
from lit_mnist.checkpoint.format import FORMAT, read_checkpoint, write_checkpoint
from lit_mnist.checkpoint.safety import check_archive
from lit_mnist.checkpoint.serialization import serialize
from lit_mnist.errors import InputError
from lit_mnist.module import LitClassifier
from lit_mnist.training.resume import SavedExperiment

CONTENT: dict[str, Any] = {
    "state_dict": {"net.weight": torch.arange(2000.0).reshape(40, 50), "net.count": torch.tensor(3)},
    "epoch": 1,
    "loops": {"deep": [1, 2.5, None, True, "text", (1, 2)]},
    "lit_mnist": {"format": FORMAT},
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "some.ckpt"
    write_checkpoint(path, CONTENT)
    return path


def add_record(path: Path, name: str, record: bytes) -> None:
    """Adds a record to a checkpoint, and writes its hash again."""
    content = path.read_bytes()[:-COMMENT_BYTES]
    path.write_bytes(content[:-2] + bytes(2))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name.format(archive.namelist()[0].partition("/")[0]), record)
    path.write_bytes(b"".join(hashed_file(memoryview(path.read_bytes()))))


def test_a_checkpoint_round_trip_is_exact(written: Path) -> None:
    found = read_checkpoint(written)
    assert content_sha256(found["state_dict"]) == content_sha256(CONTENT["state_dict"])
    assert found["loops"] == CONTENT["loops"]
    assert [path.name for path in written.parent.iterdir()] == ["some.ckpt"]


@pytest.mark.parametrize("name", [".a_new_record", "data/notes", "hashes/weights", "Index-2.json"])
def test_a_record_that_a_newer_torch_adds_is_accepted(written: Path, name: str) -> None:
    """The record has no code, and nothing unpickles it."""
    add_record(written, f"{{}}/{name}", pickle.dumps(Hostile()))
    found = read_checkpoint(written)
    assert content_sha256(found["state_dict"]) == content_sha256(CONTENT["state_dict"])
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "name", ["{}/other.pkl", "{}/DATA.PKL", "{}/code/net.py", "{}/constants.pkl", "{}/a/../b", "other/record", "record"]
)
def test_a_record_that_may_hold_code_is_rejected(written: Path, name: str) -> None:
    add_record(written, name, b"")
    with pytest.raises(InputError, match="cannot be loaded: it h"):
        read_checkpoint(written)


def test_torch_s_own_files_pass_the_safety_check(tmp_path: Path) -> None:
    """The check accepts what this release of torch writes for the values of a checkpoint."""
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    tensors = {name: torch.ones(3, 2, dtype=getattr(torch, name)).t() for name in dtypes}
    state = {**torch.nn.BatchNorm1d(3).state_dict(), **tensors}
    torch.save({"values": [1, 2.5, True, None, "text", (1, 2), 2**40, -1], "state": state}, tmp_path / "some.ckpt")
    with (tmp_path / "some.ckpt").open("rb") as file:
        check_archive(file)


def test_every_truncation_is_found(written: Path) -> None:
    whole = written.read_bytes()
    for part in range(100):
        written.write_bytes(whole[: len(whole) * part // 100])
        with pytest.raises(InputError, match=r"some\.ckpt"):
            read_checkpoint(written)


def test_every_flipped_bit_is_found(written: Path) -> None:
    whole, drawn = written.read_bytes(), random.Random(0)
    for _ in range(400):
        place, bit = drawn.randrange(len(whole)), drawn.randrange(8)
        written.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"some\.ckpt is damaged"):
            read_checkpoint(written)


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({**CONTENT, "callbacks": Hostile()}, tmp_path / "hostile.ckpt")
    with pytest.raises(InputError, match=r"hostile\.ckpt"):
        read_checkpoint(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "executed").exists()


def test_a_zip_bomb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bomb.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    with pytest.raises(InputError, match="would unpack to 50000000 bytes"):
        read_checkpoint(path)


def test_a_failed_write_leaves_the_old_file(written: Path) -> None:
    with pytest.raises(InputError, match=r"checkpoint\['loops'\] is a builtins.object"):
        write_checkpoint(written, {**CONTENT, "loops": object()})
    assert read_checkpoint(written)["epoch"] == 1
    assert [path.name for path in written.parent.iterdir()] == ["some.ckpt"]


def test_a_checkpoint_of_another_program_is_rejected(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(InputError, match="without the SHA-256"):
        read_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(InputError, match="is not a checkpoint of a run"):
        SavedExperiment.read(tmp_path / "other.ckpt", hashed=False)


TINY = ("--max-steps", 2, "--data.train_size", 300, "--data.test_size", 50, "--data.val_size", 50)


def test_the_checkpoint_of_a_run_is_a_lightning_checkpoint(program: Program) -> None:
    folder = program.train(*TINY)
    path = folder / "checkpoints" / "best.ckpt"
    module = LitClassifier.load_from_checkpoint(path, weights_only=True)
    saved = read_checkpoint(path)
    assert {f"net.{name}" for name in module.net.state_dict()} == set(saved["state_dict"])
    bare = {name.removeprefix("net."): value for name, value in saved["state_dict"].items()}
    assert weights_sha256(module.net.state_dict()) == weights_sha256(bare)
    assert "_instantiator" not in saved["hyper_parameters"]
    assert saved["hyper_parameters"]["lr"] == 0.1
    # A folder stands for its best checkpoint, and damage is detected.
    found = LitClassifier.load_from_checkpoint(folder)
    assert weights_sha256(found.net.state_dict()) == weights_sha256(bare)
    content, value = path.read_bytes(), bare["fc.weight"].numpy().tobytes()
    path.write_bytes(flipped(content, content.index(value) + 100))
    for place in (folder, path):
        with pytest.raises(InputError, match=r"best\.ckpt is damaged"):
            LitClassifier.load_from_checkpoint(place)
    with pytest.raises(InputError, match="no run folder or checkpoint"):
        LitClassifier.load_from_checkpoint(folder / "nothing")


@pytest.mark.parametrize("engine", ["lightning", "raw_ddp"])
def test_safetensors_stores_the_weights_of_a_checkpoint(program: Program, engine: str) -> None:
    folder = program.train(*TINY, engine=engine)
    for name in ("last.ckpt", "best.ckpt"):
        path, copy = folder / "checkpoints" / name, program.folder / "copy.safetensors"
        net = LitClassifier.load_from_checkpoint(path, weights_only=True).net
        for weights in (read_checkpoint(path)["state_dict"], net.state_dict()):
            save_file(weights, copy)
            assert weights_sha256(load_file(copy)) == weights_sha256(weights)


def test_a_checkpoint_from_another_gpu_loads_on_a_machine_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is stored with the name of its device, here a second GPU."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:1")
    path = tmp_path / "gpu.ckpt"
    write_checkpoint(path, CONTENT)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)
    loaded = read_checkpoint(path)
    assert all(tensor.device.type == "cpu" for tensor in loaded["state_dict"].values())
    assert not torch.cuda.is_initialized()


# So many that they outweigh the archive's own records.
SIZE = 10_000


def structured(**changed: Any) -> dict[str, Any]:
    """Returns values as a checkpoint has them."""
    return {"step": 7, "lr": 0.1, "name": "a", "weights": torch.ones(SIZE), "bias": torch.zeros(SIZE)} | changed


def tagged() -> torch.Tensor:
    tensor = torch.ones(SIZE)
    tensor.tag = Path("a")  # type: ignore[attr-defined]
    return tensor


SHARED = torch.ones(SIZE)
BIG = {f"part {number}": SHARED for number in range(100)}


NESTED: list[Any] = []
NESTED.append(NESTED)
UNLIKE: dict[str, dict[Any, Any]] = {
    "a long number": {"step": 2**200},
    "an object": {"step": object()},
    "a path": {"lr": Path("a")},
    "a tensor that claims more than its storage": {"weights": torch.zeros(1).expand(SIZE)},
    "a tensor with an attribute": {"weights": tagged()},
    "a parameter": {"weights": torch.nn.Parameter(torch.ones(SIZE))},
    "a sparse tensor": {"weights": torch.ones(SIZE).to_sparse()},
    "an object within": {"new": {"deep": [object()]}},
    "a list that contains itself": {"new": NESTED},
    "an object as a key": {Path("a"): 1},
    "one storage for all tensors": {"new": BIG},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_save_like_one_before_is_rejected_if_it_cannot_be_loaded(name: str, tmp_path: Path) -> None:
    """What is rejected alone is rejected after a similar save that was accepted, and what is accepted can be read."""
    changed = UNLIKE[name]
    serialize(structured(**({"new": {part: torch.ones(SIZE) for part in BIG}} if "new" in changed else {})))
    content = structured() | changed
    assert is_accepted(content) == is_accepted(content | {"and": "another structure"})
    if is_accepted(content):
        write_checkpoint(tmp_path / "a.ckpt", content)
        read_checkpoint(tmp_path / "a.ckpt", hashed=False)


def is_accepted(content: dict[Any, Any]) -> bool:
    try:
        serialize(content)
    except InputError:
        return False
    return True


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    checked: list[Any] = []
    original = serialization.check_archive
    monkeypatch.setattr(serialization, "check_archive", lambda file: (checked.append(1), original(file)))
    return checked


def test_a_structure_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = count_checks(monkeypatch)
    for step in range(100, 120):
        text, state = "x" * step, torch.ones(step, dtype=torch.uint8)
        serialize(structured(step=step, lr=1 / step, weights=torch.rand(SIZE), only=f"here {text}", state=state))
    assert len(checked) == 1


GROWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "a text": lambda factor: {"text": "x" * (600_000 * factor)},
    "tensors that share memory": lambda factor: {"parts": [SHARED[: SIZE // 20 * factor**3] for _ in range(20)]},
    "a tensor that repeats its bytes": lambda factor: {"tensor": torch.ones(8).expand(factor**10, 8)},
}


@pytest.mark.parametrize("name", GROWN)
def test_a_structure_that_was_accepted_is_checked_again_if_its_content_is_too_large(name: str) -> None:
    small, large = ({"number": 1, "weights": torch.ones(8)} | GROWN[name](factor) for factor in (1, 2))
    serialize(small)
    with pytest.raises(InputError):
        serialize(large)


BASE = torch.arange(4_000.0)
TENSORS = st.one_of(
    st.integers(0, 2_000).map(torch.zeros),
    st.integers(1, 2_000).map(lambda count: BASE[:count]),
    st.integers(1, 2_000).map(lambda count: BASE[::2][:count]),
    st.integers(1, 2_000).map(lambda count: torch.ones(1).expand(count)),
    st.sampled_from([torch.arange(5), torch.ones(3, 4).t(), torch.ones(2, dtype=torch.complex64).conj(), NESTED]),
)
NUMBERS = st.sampled_from([0, 1.5, None, True, 2**63 - 1, 2**70, 2**200])
TEXTS = st.sampled_from([1, 1_000, 1_200_000]).map("x".__mul__)
# Values whose leaves are not known yet.
STRUCTURES = st.recursive(
    st.sampled_from([TENSORS, NUMBERS, TEXTS]),
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 1, 2**70]), parts, max_size=4),
        st.dictionaries(st.sampled_from("abc"), parts, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def fill(structure: Any, data: st.DataObject) -> Any:
    """Returns values of a structure."""
    if isinstance(structure, dict):
        return type(structure)((key, fill(part, data)) for key, part in structure.items())
    if isinstance(structure, list | tuple):
        return type(structure)(fill(part, data) for part in structure)
    return data.draw(structure)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(STRUCTURES, st.data())
def test_what_a_save_accepts_can_be_loaded_whatever_was_saved_before(structure: Any, data: st.DataObject) -> None:
    serialization._ACCEPTED.clear()
    for _ in range(4):
        with suppress(InputError):
            check_archive(io.BytesIO(serialize({"value": fill(structure, data)})))


def test_values_that_contain_themselves_are_named_in_one_line() -> None:
    with pytest.raises(InputError, match="nested too deeply") as caught:
        serialize(structured(new=NESTED))
    assert len(str(caught.value)) < 300
