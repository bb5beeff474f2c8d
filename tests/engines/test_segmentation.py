"""SegmentationSplit are trained as digits are: any engine, any number of ranks, one loss over all pixels that count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Program, largest_difference, on_ranks, result_of, weights_of
from PIL import Image
from processes import assert_rejected
from voc_folder import write_voc

from lit_mnist.data.segmentation.palette import palette_png
from lit_mnist.data.segmentation.voc import MASKS
from lit_mnist.distributed.rank import Rank
from lit_mnist.training.loss import mean_loss

pytestmark = pytest.mark.timeout(280)
TINY = """
model: {net: deeplabv3_small, lr: 0.02}
data: {name: voc2012, image_size: 32, batch_size: 8, val_size: 9}
trainer: {max_epochs: 9}
run: {threads: 1}
"""


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which every third image has hardly a pixel that counts, and some have none."""
    folder = write_voc(tmp_path_factory.mktemp("voc"), train=41, test=11)
    for path in sorted((folder / MASKS).iterdir())[::3]:
        mask = np.array(Image.open(path))
        mask[3:] = 255
        path.write_bytes(palette_png(mask))
    return folder


@pytest.fixture
def flags(voc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[object, ...]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(TINY)
    return ("--config", tmp_path / "tiny.yaml", "--data.root", voc)


def test_one_rank_and_two_train_the_same_weights(program: Program, flags: tuple[object, ...]) -> None:
    # A larger rate makes more of a rounding error with each step.
    exact = (*flags, "--precision", "64-true", "--max-steps", 10, "--lr", 0.003, "--data.augment", "crop")
    one, two = (program.train("--devices", ranks, *exact) for ranks in (1, 2))
    assert largest_difference(weights_of(one), weights_of(two)) <= 1e-8
    first, second = result_of(one), result_of(two)
    assert first["test"]["confusion"] == second["test"]["confusion"]
    assert first["test"]["mean_iou"] == second["test"]["mean_iou"]
    assert first["test"]["count"] == second["test"]["count"] == 11
    assert first["train"]["loss"] == pytest.approx(second["train"]["loss"], abs=1e-9)


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_all_engines_on_two_ranks_are_equal_in_every_bit(
    program: Program, flags: tuple[object, ...], precision: str
) -> None:
    folder = program.folder / "comparison"
    engines = "single,raw_ddp,lightning,fabric,with_accelerate,with_hf_trainer,parameter_server"
    few = ("--devices", 2, "--max-steps", 3, "--trainer.accumulate_grad_batches", 2, "--precision", precision)
    words = ("compare", "--engines", engines, "--repeats", 0, "--run-dir", folder)
    done = program(*words, *flags, *few, timeout=280)
    assert done.code == 0, done.out + done.err
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["equal"] is True
    reference, *others = (entry for entry in comparison["engines"] if entry["name"] != "single")
    for entry in others:
        assert entry["comparison"]["met"] is True, entry["name"]
        assert entry["comparison"]["samples"]
        assert entry["loss"] == reference["loss"]
        assert entry["weights_sha256"] == reference["weights_sha256"], entry["name"]
        assert len(set(entry["weights_sha256"])) == 1


def example(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of which the first images have hardly a pixel that counts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, 4, 9, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 4, (batch, 9, 7), generator=generator)
    targets[:2] = 255
    targets[0, 0, 0] = 1
    targets[4, :5] = 255
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_over_the_ranks_is_the_mean_over_all_pixels_that_count(tmp_path: Path, smoothing: float) -> None:
    logits, targets = example()
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=255, label_smoothing=smoothing)
    expected.backward()
    gradient = leaf.grad
    assert gradient is not None
    assert mean_loss(logits, targets, smoothing).item() == pytest.approx(expected.item(), rel=1e-12)

    def work(rank: Rank) -> None:
        rows = slice(2 * rank.rank, 2 * rank.rank + 2)
        own = logits[rows].clone().requires_grad_()
        loss = mean_loss(own, targets[rows], smoothing)
        loss.backward()
        assert own.grad is not None
        torch.testing.assert_close(own.grad / 3, gradient[rows], rtol=1e-12, atol=1e-15)
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 3, expected.detach(), rtol=1e-12, atol=0)

    on_ranks(work, tmp_path, 3)


def test_where_no_pixel_counts_the_loss_and_its_gradient_are_zero() -> None:
    logits, targets = example()
    logits.requires_grad_()
    loss = mean_loss(logits, torch.full_like(targets, 255))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_of_digits_the_loss_is_torch_s_own_to_the_bit() -> None:
    logits, targets = torch.randn(50, 10), torch.randint(0, 10, (50,))
    assert torch.equal(mean_loss(logits, targets, 0.1), F.cross_entropy(logits, targets, label_smoothing=0.1))


def test_a_batch_of_nothing_but_border_trains_on(program: Program, flags: tuple[object, ...]) -> None:
    """Two images at a time, one to a rank: of many steps one rank has a single row, of some both."""
    folder = program.train(*flags, "--devices", 2, "--batch-size", 2, "--max-steps", 12, "--precision", "32-true")
    assert 0 < result_of(folder)["train"]["loss"] < 10


def test_checkpointed_activations_change_no_bit(program: Program, flags: tuple[object, ...]) -> None:
    few = (*flags, "--max-steps", 3, "--precision", "32-true")
    for ranks in (1, 2):
        plain, again = (
            program.train(*few, "--devices", ranks, "--model.checkpoint_activations", kept, engine="raw_ddp")
            for kept in ("false", "true")
        )
        assert result_of(plain)["weights_sha256"] == result_of(again)["weights_sha256"]


REFUSALS: dict[str, tuple[tuple[object, ...], list[str]]] = {
    "a digits' net": (("--model.net", "convnet"), ["model.net convnet", "voc2012", "deeplabv3_small"]),
    "a net for segmentation": (("--data.name", "mnist"), ["deeplabv3_small", "mnist"]),
    "a digits' augmentation": (("--data.augment", "affine"), ["data.augment affine", "crop"]),
    "views": (("--model.views", 5), ["model.views 5"]),
    "a compiled net": (("--model.compile", "true"), ["model.compile"]),
    "one image to a rank": (("--batch-size", 1), ["data.batch_size 1", "batch norm"]),
    "one image to a rank, not synchronised": (
        ("--batch-size", 2, "--devices", 2, "--trainer.sync_batchnorm", "false"),
        ["data.batch_size 2", "batch norm"],
    ),
    "a backbone that nobody has published": (("--model.weights", "backbone"), ["backbone", "deeplabv3_small"]),
    "weights that are not there": (("--model.weights", "none.pt"), ["none.pt"]),
    "a rate that follows a fixed batch": (("--model.lr_scale", "linear"), ["lr_scale", "batch_per"]),
    "a tiny image": (("--data.image_size", 8), ["data.image_size", "16"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused(program: Program, flags: tuple[object, ...], case: str) -> None:
    words, parts = REFUSALS[case]
    assert_rejected(program(*flags, *words), *parts)
    assert not (program.folder / "runs").exists()


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_the_rate_follows_the_ranks(program: Program, scale: str, factor: float) -> None:
    few = ("--max-steps", 1, "--data.train_size", 300, "--data.test_size", 20, "--data.val_size", 0)
    folder = program.train(
        *("--devices", 2, "--lr", 0.01, "--data.batch_per", "rank", "--model.lr_scale", scale, *few),
        engine="raw_ddp",
    )
    result: dict[str, Any] = result_of(folder)
    assert result["train"]["lr"] == pytest.approx(0.01 * factor)
    assert result["config"]["model"]["lr"] == 0.01
