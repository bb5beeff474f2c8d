"""The weights that a training begins with, from a file or another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Program, weights_of
from processes import assert_rejected

from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.training.weights import read_weights

NET = ModelSettings(net="basicnet")
SMALL = (
    *("--model.net", "basicnet", "--data.train_size", 320, "--data.val_size", 64, "--data.test_size", 64),
    *("--run.threads", 1),
)


def test_weights_are_taken_from_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    wanted = build_net(NET, num_classes=10, seed=9).state_dict()
    torch.save(wanted, tmp_path / "plain.pt")
    save_file({name: tensor.contiguous() for name, tensor in wanted.items()}, tmp_path / "safe.safetensors")
    for path in sorted(tmp_path.iterdir()):
        weights = read_weights(replace(NET, weights=str(path)), num_classes=10)
        found = build_net(NET, num_classes=10, seed=1, weights=weights).state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), path
    assert read_weights(NET, num_classes=10) is None


DAMAGES = {
    "other classes": ({"fc2.weight": torch.zeros(9, 128)}, "fc2.weight with the shape"),
    "another name": ({"other.weight": torch.zeros(1)}, "has other.weight, which no such network has"),
    "no tensor": ({"conv1.weight": "text"}, "conv1.weight"),
    "no number": ({"fc2.bias": torch.full((10,), torch.nan)}, "fc2.bias that are infinite or NaN"),
    "whole numbers": ({"fc2.bias": torch.zeros(10, dtype=torch.int32)}, "fc2.bias as torch.int32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_another_network_are_refused(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    path = tmp_path / "weights.pt"
    torch.save({**build_net(NET, num_classes=10, seed=9).state_dict(), **change}, path)
    with pytest.raises(InputError, match=message):
        read_weights(replace(NET, weights=str(path)), num_classes=10)


def test_wrapped_weights_are_refused_by_what_they_have_and_lack(tmp_path: Path) -> None:
    weights = build_net(NET, num_classes=10, seed=9).state_dict()
    path = tmp_path / "weights.pt"
    torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    with pytest.raises(InputError, match=r"lacks conv1\.weight, and has module\.conv1\.weight"):
        read_weights(replace(NET, weights=str(path)), num_classes=10)


def test_weights_in_torch_s_old_form_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(build_net(NET, num_classes=10, seed=9).state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match=r"torch\.save\(net\.state_dict\(\), FILE\) writes"):
        read_weights(replace(NET, weights=str(path)), num_classes=10)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\3\4" + bytes(100)])
def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"weights\.(pt|safetensors)"):
        read_weights(replace(NET, weights=str(path)), num_classes=10)


def test_a_training_begins_with_the_weights_of_another_and_does_not_need_them_again(program: Program) -> None:
    first = program.train("fit", *SMALL, "--max-steps", 1, "--precision", "32-true", engine="raw_ddp")
    checkpoint = first / "checkpoints" / "last.ckpt"
    still = ("--lr", 1e-30, "--model.schedule", "constant", "--model.weights", checkpoint, "--max-steps", 2)
    for engine, ranks in (("raw_ddp", 1), ("lightning", 2)):
        second = program.train("fit", *SMALL, *still, "--devices", ranks, "--precision", "32-true", engine=engine)
        old, new = weights_of(first), weights_of(second)
        moved = [name for name in old if not torch.equal(old[name], new[name])]
        assert all("running_" in name or "num_batches" in name for name in moved)
    checkpoint.rename(program.folder / "aside")
    done = program("test", "--ckpt", second)
    assert done.code == 0, done.out + done.err
    assert "state_dict" in read_checkpoint(second / "checkpoints" / "last.ckpt")
    assert_rejected(program(*SMALL, "--model.weights", checkpoint), "last.ckpt")
