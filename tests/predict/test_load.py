"""`load`: the network of a run predicts in Python what the command predicts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from conftest import Program
from PIL import Image

import lit_mnist
from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.digits.split import Split
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    few = ("--data.train_size", 2000, "--data.val_size", 0, "--data.test_size", 100)
    return shared_program.train("--max-steps", 20, "--lr", 0.01, "--precision", "32-true", *few, engine="single")


def test_a_loaded_network_predicts_what_the_command_predicts(trained: Path, shared_program: Program) -> None:
    words = ("predict", "--ckpt", trained, "--data.test_size", 300, "--precision", "32-true")
    with (shared_program.train(*words, engine="single") / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    test = load_dataset(DataSettings()).test
    assert isinstance(test, Split)
    network = lit_mnist.load(trained)
    assert not network.net.training
    classes, probabilities = network.predict(test.images[:300])
    assert classes.tolist() == [int(row["predicted"]) for row in rows]
    # A network that has learned nothing predicts one class of all images, whatever is wrong with them.
    assert len(classes.unique()) > 5
    assert probabilities.tolist() == pytest.approx([float(row["probability"]) for row in rows], abs=1e-4)
    for same in (test.images[:300] / 255, (test.images[:300] / 255).unsqueeze(1), test.images[:300].numpy()):
        assert torch.equal(network.predict(same)[0], classes)
    drawn = [Image.fromarray(image.numpy()) for image in test.images[:5]]
    assert torch.equal(network.predict(drawn)[0], classes[:5])


def test_image_files_are_read_as_the_command_reads_them(trained: Path, tmp_path: Path) -> None:
    test = load_dataset(DataSettings()).test
    assert isinstance(test, Split)
    Image.fromarray(255 - test.images[0].numpy()).resize((140, 140)).save(tmp_path / "seven.png")
    assert lit_mnist.load(trained / "checkpoints" / "last.ckpt").predict([tmp_path / "seven.png"])[0].shape == (1,)
    assert lit_mnist.load(trained).predict(tmp_path / "seven.png")[0].shape == (1,)


@pytest.mark.parametrize("images", [torch.zeros(1, 5, 5), torch.full((1, 28, 28), 7.0), ["nowhere.png"]])
def test_images_that_cannot_be_used_are_rejected(trained: Path, images: object) -> None:
    with pytest.raises(InputError):
        lit_mnist.load(trained).predict(images)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_not_loaded(trained: Path, tmp_path: Path) -> None:
    content = bytearray((trained / "checkpoints" / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        lit_mnist.load(tmp_path / "damaged.ckpt")
