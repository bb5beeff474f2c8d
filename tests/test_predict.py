"""Predictions of a user's own images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.mnist import load
from lit_mnist.module import LitClassifier
from lit_mnist.predict import main, read_digit

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with weights of 100 steps."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=100, enable_checkpointing=False, **QUIET)
    trainer.fit(LitClassifier(seed=1), datamodule=MNISTDataModule(val_size=0, seed=1))
    (folder / "checkpoints").mkdir()
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    return folder


def draw(pixels: torch.Tensor, way: str) -> Image.Image:
    """Returns a digit of MNIST as a user could have it."""
    image = Image.fromarray(pixels.numpy())
    if way == "small":
        return image
    # Larger, not in the middle, dark on grey paper.
    page = Image.new("L", (300, 200), 235)
    page.paste(Image.eval(image.resize((112, 112)), lambda value: 235 - value * 4 // 5), (150, 40))
    if way == "transparent":
        alpha = Image.eval(page, lambda value: 255 if value < 200 else 0)
        page = Image.merge("LA", (Image.new("L", page.size, 0), alpha))
    return page


@pytest.mark.parametrize(("way", "suffix"), [("small", "png"), ("large", "jpg"), ("transparent", "png")])
def test_images_of_a_user(
    run_dir: Path, way: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split, files = load().test, []
    for row in range(20):
        files.append(tmp_path / f"{row}.{suffix}")
        draw(split.images[row], way).save(files[-1])
    main([str(run_dir), *map(str, files)])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _, _ in lines] == [str(file) for file in files]
    right = sum(int(label) == truth for (_, label, _), truth in zip(lines, split.labels.tolist(), strict=False))
    assert right >= 18
    assert all(0.1 <= float(probability) <= 1 for _, _, probability in lines)


def test_images_of_mnist_hardly_change(tmp_path: Path) -> None:
    for row, pixels in enumerate(load().test.images[:20]):
        Image.fromarray(pixels.numpy()).save(tmp_path / "digit.png")
        found = read_digit(tmp_path / "digit.png").numpy().astype(float)
        assert np.abs(found - pixels.numpy()).mean() < 6, row


@pytest.mark.parametrize("case", ["no run", "no image", "text", "blank", "other module", "damaged"])
def test_bad_input_is_rejected(run_dir: Path, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, checkpoint = tmp_path / "image.png", run_dir
    Image.fromarray(load().test.images[0].numpy()).save(image)
    if case == "no run":
        checkpoint = tmp_path / "missing"
    elif case == "no image":
        image.unlink()
    elif case == "text":
        image.write_text("not an image")
    elif case == "blank":
        Image.new("L", (40, 40), 250).save(image)
    else:
        checkpoint = tmp_path / "other.ckpt"
        torch.save({"state_dict": {"weight": torch.zeros(1)}, "hyper_parameters": {"lr": 0.1}}, checkpoint)
        if case == "damaged":
            checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(SystemExit) as end:
        main([str(checkpoint), str(image)])
    assert end.value.code == 2
    named = image if case in ("no image", "text", "blank") else checkpoint
    assert str(named) in capsys.readouterr().err
