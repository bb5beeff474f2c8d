"""Hostile checkpoints and data: exit code 2 and one message; nothing is executed or imported, no memory is filled."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, result_of

import lit_mnist
from faults.conftest import SMALL
from faults.hostile import ALIASES, CHECKPOINTS
from faults.limits import assert_rejected_safely, limited, measurements, parts, reading, slug
from lit_mnist.checkpoint.format import SECTION, read_checkpoint, write_checkpoint
from lit_mnist.data.dataset import class_names
from lit_mnist.data.digits.family import locked_folder, partial_folder
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment, ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.run.folder import RunFolder

FILES = Path(lit_mnist.__file__).parent / "data" / "digits" / "files"
TINY: tuple[object, ...] = (*SMALL, "--max-steps", 2, "--model.schedule", "constant")
print_measurements = pytest.fixture(scope="module", autouse=True)(measurements)


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow, id="every command"), False])
@pytest.mark.parametrize("cases", parts(CHECKPOINTS), ids=lambda cases: cases[0])
def test_hostile_checkpoints_are_rejected(tmp_path: Path, cases: list[str], every: bool) -> None:
    """Each command rejects a third of them, or every one."""
    commands = {}
    for number, name in enumerate(cases):
        path = tmp_path / slug(name) / "hostile.ckpt"
        path.parent.mkdir()
        CHECKPOINTS[name](path)
        commands[slug(name)] = reading(path) if every else reading(path)[number % 3 :: 3]
    assert_rejected_safely(limited(commands, tmp_path))
    assert not Path("/tmp/executed").exists()
    assert not list(tmp_path.glob("*/runs"))


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    return shared_program.train(*TINY)


Change = Callable[[dict[str, Any]], None]
_MISSING = object()


def put(path: str, value: Any) -> Change:
    """Changes an entry of a checkpoint, or removes it."""

    def change(checkpoint: dict[str, Any]) -> None:
        part: Any = checkpoint
        *parents, last = path.split("/")
        for name in parents:
            part = part[int(name) if isinstance(part, list) else name]
        if value is _MISSING:
            del part[last]
        else:
            part[last] = value

    return change


def ours(name: str, value: Any) -> Change:
    return put(f"{SECTION}/{name}", value)


def setting(name: str, value: Any) -> Change:
    return ours(f"config/{name}", value)


# Written and hashed as this project does: only their content is wrong.
CONTENTS: dict[str, Change] = {
    "a callback": setting("trainer/callbacks", [{"class_path": "canary_module.Canary"}]),
    "a logger": setting("trainer/logger", {"class_path": "canary_module.Canary"}),
    "a class as the network": setting("model/net", "canary_module.Canary"),
    "a class path as the network": setting("model/net", {"class_path": "canary_module.Canary"}),
    "a class path as text": setting("model/net", '{"class_path": "canary_module.Canary"}'),
    "a class as the precision": ours("precision", "canary_module.Canary"),
    "a tag": setting("run/save_every", "!!python/object/apply:os.system ['touch executed']"),
    "aliases in a setting": setting("run/save_every", ALIASES),
    "a deep text": setting("run/save_every", "[" * 200_000),
    "a deep path": setting("data/root", "[" * 200_000),
    "a long list": setting("trainer/devices", list(range(20_000))),
    "no text as a key": setting("model", {1: 2}),
    "a tensor as a setting": setting("model/lr", torch.ones(3)),
    "NaN": setting("model/lr", float("nan")),
    "endless": setting("data/val_size", float("inf")),
    "no experiment": ours("config", _MISSING),
    "a text as the experiment": ours("config", "x"),
    "no precision": ours("precision", _MISSING),
    "a tensor as the format": ours("format", torch.tensor([2, 2])),
    "a trillion classes": ours("num_classes", 10**12),
    "no step": put("global_step", _MISSING),
    "a text as the step": put("global_step", "x"),
    "a step before the first": put("global_step", -1),
    "no weights": put("state_dict", {}),
    "a list of weights": put("state_dict", []),
    "other weights": put("state_dict/net.fc.bias", torch.zeros(11)),
    "a number as weights": put("state_dict/net.fc.bias", 3),
}


@pytest.mark.parametrize("cases", parts(CONTENTS), ids=lambda cases: cases[0])
def test_well_hashed_content_that_is_not_of_a_run_is_rejected(tmp_path: Path, trained: Path, cases: list[str]) -> None:
    commands = {}
    for name in cases:
        content = read_checkpoint(trained / "checkpoints" / "last.ckpt")
        CONTENTS[name](content)
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name / "hostile.ckpt", content)
        # Only some commands, since the others read the content in the same way, and not those of a user's module.
        every = reading(tmp_path / name / "hostile.ckpt")
        commands[name] = [every[0], every[4], every[-1]]
    assert_rejected_safely(limited(commands, tmp_path))


def test_other_entries_of_a_valid_checkpoint_are_never_used(tmp_path: Path, trained: Path) -> None:
    """Lightning imports the values of `_class_path` and `_instantiator`; this project treats them as plain values."""
    content = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    names = {"_class_path": "canary_module.Canary", "_instantiator": "canary_module.call", "seed": 3}
    content |= {**names, "hparams_name": "canary_module.Canary", "hparams_type": "canary_module.Canary"}
    content["hyper_parameters"] |= names
    content["callbacks"]["canary_module.Canary"] = names
    content["datamodule_hyper_parameters"] = content["MNISTDataModule"] = names
    for name, value in (("inject", "kill:rank=0,step=1"), ("dir", str(tmp_path / "executed")), ("max_restarts", 9)):
        setting(f"run/{name}", value)(content)
    # The settings of the previous run count if a training resumes, but not if its weights are evaluated.
    setting("trainer/devices", 100_000)(content)
    setting("data/eval_batch_size", 10**9)(content)
    write_checkpoint(tmp_path / "odd.ckpt", content)
    found = limited(
        {
            "valid": [
                ("test", "--ckpt", tmp_path / "odd.ckpt", "--run-dir", "tested"),
                ("--resume", tmp_path / "odd.ckpt", "--devices", 1, "--max-steps", 3, "--run-dir", "resumed"),
            ],
            "100 000 devices": [("--resume", tmp_path / "odd.ckpt")],
        },
        tmp_path,
    )
    valid = found.pop("valid")
    assert [ended.code for ended in valid] == [0, 0], valid
    assert_rejected_safely(found, "100000 ranks")


def of_another_data_set(trained: Path, **data: Any) -> dict[str, Any]:
    """Returns a checkpoint whose experiment names data other than those it was trained on."""
    content = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    settings = ModelSettings(schedule="constant")
    classes = len(class_names(DataSettings(name=data["name"])))
    weights = build_net(settings, num_classes=classes, seed=0).state_dict()
    content["state_dict"] = {f"net.{name}": tensor for name, tensor in weights.items()}
    experiment = Experiment(model=settings, data=DataSettings(**data))
    content[SECTION] |= {"config": experiment.to_dict(), "num_classes": classes}
    return content


@pytest.mark.parametrize("name", ["fashion_mnist", "emnist"])
def test_a_checkpoint_chooses_no_place_to_write_or_download_to(
    program: Program, trained: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    victim, cache = program.folder / "victim", program.folder / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    hostile = program.folder / "hostile.ckpt"
    write_checkpoint(hostile, of_another_data_set(trained, name=name, root=str(victim)))
    for words in (("test", "--ckpt"), ("validate", "--ckpt"), ("predict", "--ckpt"), ("--resume",)):
        done = program(*words, hostile, timeout=60)
        assert done.code == 2, done.out + done.err
        assert name in done.err, done.err
        assert "data.root" in done.err, done.err
        assert not victim.exists(), words
        assert not cache.exists(), words


def test_an_evaluation_reads_the_data_where_the_command_line_says(program: Program, trained: Path) -> None:
    content = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    setting("data/root", "/nowhere")(content)
    elsewhere = program.folder / "elsewhere.ckpt"
    write_checkpoint(elsewhere, content)
    tested = program.train("test", "--ckpt", elsewhere)
    assert result_of(tested)["data"]["source"] == "embedded"
    done = program("test", "--ckpt", elsewhere, "--data.root", program.folder / "empty")
    assert done.code == 2
    assert f"MNIST is not in {program.folder / 'empty'}" in done.err
    done = program("--resume", elsewhere, "--max-steps", 3)
    assert done.code == 2
    assert "MNIST is not in /nowhere" in done.err


@pytest.mark.slow
def test_torch_s_variable_does_not_change_a_command(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests show that all commands still reject each hostile file."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    folder = program.folder / "run"
    for words in (
        ("fit", *SMALL, "--max-steps", 2, "--model.schedule", "constant", "--run-dir", folder),
        ("test", "--ckpt", folder),
        ("predict", "--ckpt", folder),
        ("--resume", folder, "--max-steps", 3),
    ):
        done = program(*words)
        assert done.code == 0, (words, done.out + done.err)


@pytest.mark.slow
def test_torch_s_variable_does_not_change_a_comparison(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    done = program("compare", "--engines", "single", *SMALL, "--max-steps", 2, "--repeats", 1, "--timed-steps", 21)
    assert done.code == 0, done.out + done.err


def _bomb() -> bytes:
    return gzip.compress(bytes(200 << 20), 1)


DATA: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": ("train-labels-idx1-ubyte.gz", lambda content: content[: len(content) // 2]),
    "a flipped bit": ("t10k-images-idx3-ubyte.gz", lambda content: content[:5000] + b"?" + content[5001:]),
    "other labels": ("t10k-labels-idx1-ubyte.gz", lambda content: gzip.compress(gzip.decompress(content)[::-1])),
    "a bomb": ("t10k-labels-idx1-ubyte.gz", lambda _: _bomb()),
}


def test_damaged_data_are_rejected_before_a_rank_starts(tmp_path: Path) -> None:
    commands = {}
    for case, (name, change) in DATA.items():
        root = raw(tmp_path / case)
        content = (root / name).read_bytes()
        (root / name).unlink()
        (root / name).write_bytes(change(content))
        commands[case] = [(*SMALL, "--devices", 2, "--data.root", tmp_path / case)]
    found = limited(commands, tmp_path)
    assert_rejected_safely(found, "is not MNIST's")
    assert all(DATA[case][0] in ended.err for case in found for ended in found[case])
    assert not list(tmp_path.glob("*/runs"))


def raw(folder: Path) -> Path:
    """Creates a folder with the official files, and returns the folder of the files."""
    root = folder / "MNIST" / "raw"
    root.mkdir(parents=True)
    for path in FILES.glob("*.gz"):
        (root / path.name).symlink_to(path)
    return root


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "FIFO"])
def test_a_lock_that_another_user_has_planted_is_not_followed(tmp_path: Path, kind: str) -> None:
    """Otherwise another user of a shared data folder could truncate or create a file of the user."""
    lock, victim = tmp_path / "shared" / ".download.lock", tmp_path / "victim.txt"
    lock.parent.mkdir()
    if kind == "link":
        victim.write_text("precious")
    if kind == "FIFO":
        os.mkfifo(lock)
    else:
        lock.symlink_to(victim)
    if kind != "FIFO":
        with pytest.raises(OSError, match=r"symbolic links.*\.download\.lock"), locked_folder(lock.parent):
            pass
    assert [path.name for path in lock.parent.iterdir()] == [".download.lock"]
    assert victim.exists() == (kind == "link")
    assert kind != "link" or victim.read_text() == "precious"
    # The same applies to the locks of run folders.
    lock.rename(lock.with_name("run.lock"))
    with pytest.raises(InputError, match="a lock file must"):
        RunFolder.claim(lock.parent, writes=())
    assert kind != "link" or victim.read_text() == "precious"


def test_a_folder_that_another_user_has_planted_is_not_filled(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / ".partial").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").mkdir()
    with pytest.raises(FileExistsError), partial_folder(tmp_path / "shared" / ".partial"):
        pass
    assert not list((tmp_path / "victim").iterdir())


def test_a_stray_file_of_tensors_is_never_loaded(tmp_path: Path) -> None:
    """Older releases of torchvision unpickled such a file."""
    raw(tmp_path / "with")
    for case in ("with", "without"):
        (tmp_path / case / "MNIST" / "processed").mkdir(parents=True)
        for name in ("training.pt", "test.pt"):
            CHECKPOINTS["legacy pickle"](tmp_path / case / "MNIST" / "processed" / name)
    words = {case: [(*SMALL, "--max-steps", 1, "--data.root", tmp_path / case)] for case in ("with", "without")}
    found = limited(words, tmp_path)
    assert found.pop("with")[0].code == 0
    assert_rejected_safely(found, "MNIST is not in")
