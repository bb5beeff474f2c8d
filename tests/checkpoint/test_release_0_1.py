"""The runs of release 0.1 are evaluated, loaded and resumed, and damage to them is found."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Program, flipped, result_of, weights_of
from processes import ROOT, assert_rejected

from lit_mnist.checkpoint.format import FORMAT, SECTION, read_checkpoint
from lit_mnist.errors import InputError
from lit_mnist.predict.trained import load

RUNS = Path(__file__).parent / "runs_of_0_1"
NAMES = ("complete", "interrupted", "user")
# The rounding of another processor, as a part of what the resumed steps change.
CLOSE = 0.1


def copied(program: Program, name: str) -> Path:
    """Copies a run to the folder of the program, with the packages of the user."""
    shutil.copytree(RUNS / name, program.folder / name)
    if name == "user":
        shutil.copytree(ROOT / "examples" / "user_module" / "spirals", program.folder / "spirals")
    return program.folder / name


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Returns the Euclidean distance of two sets of weights."""
    return float(torch.stack([(weights[key].double() - others[key].double()).norm() for key in others]).norm())


def imports(name: str) -> tuple[str, ...]:
    return ("--import", "spirals") if name == "user" else ()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_evaluated(program: Program, name: str) -> None:
    folder = copied(program, name)
    tested = result_of(program.train("test", "--ckpt", folder, *imports(name)))
    if name == "complete":
        # Its schema is that of its release.
        before = json.loads((RUNS / name / "result.json").read_text())
        assert tested["test"]["accuracy"] == pytest.approx(before["test"]["accuracy"], abs=0.005)
        assert tested["test"]["count"] == before["test"]["count"]
        # The best weights are those of the last step here.
        assert tested["weights_sha256"] == before["weights_sha256"]
    else:
        assert tested["weights_sha256"]


@pytest.mark.parametrize("name", ["complete", "interrupted"])
def test_a_run_is_loaded(name: str) -> None:
    classes, probabilities = load(RUNS / name).predict(torch.zeros(3, 28, 28))
    assert classes.shape == (3,)
    assert bool(((probabilities > 0) & (probabilities <= 1)).all())


@pytest.mark.parametrize("name", ["interrupted", "user"])
def test_an_interrupted_run_is_resumed_to_its_end(program: Program, name: str) -> None:
    folder = copied(program, name)
    done = program("fit", "--resume", folder, *imports(name))
    assert done.code == 0, done.out + done.err
    assert f"after step {20 if name == 'interrupted' else 21}" in done.out
    assert "bit-identical" not in done.out
    end = result_of(folder)
    whole = program.train("fit", "--config", RUNS / name / "config.yaml", *imports(name))
    assert (end["steps"], end["epochs"]) == (result_of(whole)["steps"], result_of(whole)["epochs"])
    begin = read_checkpoint(RUNS / name / "checkpoints" / "last.ckpt")["state_dict"]
    rounding, change = (distance(weights, weights_of(whole)) for weights in (weights_of(folder), begin))
    assert rounding < CLOSE * change
    # From here on, the checkpoints have the format of today.
    content = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert content[SECTION]["format"] == FORMAT
    assert content[SECTION]["config"]["seed_everything"] == end["config"]["seed_everything"]
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)[SECTION]["format"] == FORMAT


@pytest.mark.parametrize(
    ("name", "flags", "part"),
    [
        ("interrupted", ("--lr", 0.5), "model.lr is 0.5 here, but 0.1 in"),
        ("user", ("--model.hidden", 8), "model.init_args.hidden is 8 here, but 64 in"),
        ("user", ("--devices", 1), "saved by 2 ranks,"),
    ],
)
def test_a_resumed_run_keeps_its_settings(program: Program, name: str, flags: tuple[object, ...], part: str) -> None:
    folder = copied(program, name)
    assert_rejected(program("fit", "--resume", folder, *flags, *imports(name)), part)


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    """A flipped bit of a weight, and 50 truncations."""
    path, copy = RUNS / name / "checkpoints" / "last.ckpt", tmp_path / "damaged.ckpt"
    whole, weight = path.read_bytes(), next(iter(read_checkpoint(path)["state_dict"].values()))
    drawn, place = random.Random(0), whole.index(weight.numpy().tobytes())
    for offset in [drawn.randrange(weight.nbytes) for _ in range(20)]:
        copy.write_bytes(flipped(whole, place + offset))
        with pytest.raises(InputError, match=r"damaged\.ckpt is damaged"):
            read_checkpoint(copy)
    for part in range(50):
        copy.write_bytes(whole[: len(whole) * part // 50])
        with pytest.raises(InputError, match=r"damaged\.ckpt is damaged"):
            read_checkpoint(copy)
