"""The network, the loss, the metrics and the masks of the example of segmentation, each against a plain computation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import on_ranks
from processes import ROOT
from segmentation import LitSegmenter
from segmentation.deeplab import DeepLab, Net, published_backbone
from segmentation.dropout import DropoutKey
from segmentation.images import IGNORED
from segmentation.loss import MeanPixelLoss, lr_factor, pixel_loss
from segmentation.masks import enlarge, unique_names
from segmentation.scores import KEPT, best_and_worst, image_scores
from segmentation.torch_internals import deeplab_parts
from torchvision.models import get_model, segmentation

from lit_mnist.distributed.rank import Rank

pytestmark = pytest.mark.timeout(200)


def key(number: int, samples: int) -> DropoutKey:
    return DropoutKey(7, number, samples, slice(0, samples))


def example(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of which the first images have hardly a pixel that counts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, 4, 9, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 4, (batch, 9, 7), generator=generator)
    targets[:2] = 255
    targets[0, 0, 0] = 1
    targets[4, :5] = 255
    return logits, targets


def test_the_mean_over_the_ranks_is_the_mean_over_all_valid_pixels(tmp_path: Path) -> None:
    logits, targets = example()
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=255)
    expected.backward()
    gradient = leaf.grad
    assert gradient is not None
    for found in pixel_loss(logits, targets):
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)

    def work(rank: Rank) -> None:
        rows = slice(2 * rank.rank, 2 * rank.rank + 2)
        part = logits[rows].clone().requires_grad_()
        loss, mean = pixel_loss(part, targets[rows])
        loss.backward()
        assert part.grad is not None
        torch.testing.assert_close(part.grad / 3, gradient[rows], rtol=1e-12, atol=1e-15)
        assert mean.item() == pytest.approx(expected.item(), rel=1e-6)
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 3, expected.detach(), rtol=1e-12, atol=0)

    on_ranks(work, tmp_path, 3)


def test_without_a_valid_pixel_the_loss_and_its_gradient_are_zero() -> None:
    logits, targets = example()
    logits.requires_grad_()
    loss, mean = pixel_loss(logits, torch.full_like(targets, 255))
    loss.backward()
    assert loss.item() == mean.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_metrics_are_those_of_all_valid_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, 6, 9, generator=generator)
    logits[:, 4] = -99.0
    targets = torch.randint(0, 4, (7, 6, 9), generator=generator)
    targets[0] = targets[3, 2:] = IGNORED
    metrics = LitSegmenter(5).val_metrics
    for rows in (slice(0, 3), slice(3, 7)):
        for metric in metrics.values():
            metric.update(logits[rows], targets[rows])
    valid = targets != IGNORED
    predicted, true = logits.argmax(dim=1)[valid].numpy(), targets[valid].numpy()
    shares = [
        ((predicted == kind) & (true == kind)).sum() / ((predicted == kind) | (true == kind)).sum() for kind in range(4)
    ]
    # Class 4 neither occurs nor is predicted.
    assert metrics["val_mean_iou"].compute().item() == pytest.approx(np.mean(shares))
    assert metrics["val_accuracy"].compute().item() == pytest.approx((predicted == true).mean())
    flat = logits.double().log_softmax(dim=1).permute(0, 2, 3, 1)[valid].numpy()
    assert metrics["val_loss"].compute().item() == pytest.approx(-flat[np.arange(len(true)), true].mean())


def test_images_of_nothing_but_border_have_a_loss_of_zero() -> None:
    metric = MeanPixelLoss()
    metric.update(torch.randn(2, 3, 4, 4), torch.full((2, 4, 4), IGNORED))
    assert metric.compute() == 0


def test_the_undocumented_parts_of_torchvision_accept_the_same_arguments() -> None:
    pyramid, bottleneck = deeplab_parts()
    block = bottleneck(64, 16, 1, torch.nn.Identity(), dilation=2)
    assert block(torch.randn(2, 64, 8, 8)).shape == (2, 16 * bottleneck.expansion, 8, 8)
    made = pyramid(64, (2, 4), 32)
    assert made(torch.randn(2, 64, 8, 8)).shape == (2, 32, 8, 8)
    assert isinstance(made.project[-1], torch.nn.Dropout)


@pytest.mark.parametrize("net", ["deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50"])
def test_a_network_computes_what_torchvision_s_does(net: Net) -> None:
    own = DeepLab(net, num_classes=5).eval()
    other = getattr(segmentation, net)(weights=None, weights_backbone=None, num_classes=5, aux_loss=None).eval()
    other.load_state_dict(own.state_dict())
    images = torch.randn(2, 3, 50, 70, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(own(images), other(images)["out"], rtol=1e-4, atol=1e-5)


def test_dropout_is_a_function_of_the_key_and_touches_no_generator() -> None:
    net = DeepLab("deeplabv3_small", num_classes=3).train()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    first, again, other = (net(images, key(number, 4)) for number in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-3)
    with pytest.raises(ValueError, match="key"):
        net(images)


@pytest.mark.parametrize("net", ["deeplabv3_small", "deeplabv3_mobilenet_v3_large"])
def test_activations_that_are_computed_twice_give_the_same_gradient_and_statistics(net: Net) -> None:
    images = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    found = []
    for again in (False, True):
        made = LitSegmenter(3, net, checkpoint_activations=again).net.train()
        made(images, key(0, 3)).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in made.named_parameters()}
        found.append({**dict(made.named_buffers()), **gradients})
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert tensor is not None
        assert torch.equal(tensor, found[1][name]), name
    assert {int(counted) for name, counted in made.named_buffers() if name.endswith("num_batches_tracked")} == {1}


@pytest.mark.parametrize("net", ["deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "deeplabv3_resnet101"])
def test_every_weight_of_a_backbone_has_its_published_one(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def known(_: str) -> dict[str, SimpleNamespace]:
        with torch.device("meta"):
            weights = get_model(net.removeprefix("deeplabv3_"), weights=None).state_dict()
        return {"IMAGENET1K_V1": SimpleNamespace(get_state_dict=lambda **_: weights)}

    monkeypatch.setattr("segmentation.deeplab.get_model_weights", known)
    found = published_backbone(net)
    with torch.device("meta"):
        own = DeepLab(net, num_classes=21).state_dict()
    assert found.keys() == {name for name in own if name.startswith("backbone.")}
    assert all(found[name].shape == own[name].shape for name in found)


def test_the_learning_rate_rises_and_falls() -> None:
    onecycle = [round(lr_factor("onecycle", None, step, 859), 4) for step in (0, 213, 214, 215, 216, 857, 858)]
    assert onecycle == [0.0445, 0.9955, 1.0, 1.0, 0.9984, 0.0041, 0.0026]
    assert [lr_factor("polynomial", 0.02, step, 100) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert lr_factor("polynomial", None, 50, 100) == pytest.approx(0.5**0.9)
    assert lr_factor("constant", None, 7, 100) == 1


def test_a_mask_is_enlarged_smoothly_to_the_size_of_the_image() -> None:
    small = np.zeros((8, 8), np.uint8)
    small[:, 4:] = 3
    small[3:5, 3:5] = 21
    mask = enlarge(small, (200, 100))
    assert mask.shape == (100, 200)
    assert set(np.unique(mask)) == {0, 3, 21}
    assert (mask[:25, :100] == 0).all()
    assert (mask[:25, 100:] == 3).all()
    assert mask[50, 100] == 21


def test_output_names_are_unique() -> None:
    files = [Path(name) for name in ("a/x.jpg", "b/x.png", "x-1.png", "y.png", "c/x.gif", "x-1-1.png")]
    names = unique_names(files)
    assert names[2:4] == ["x-1", "y"]
    assert len(set(names)) == len(names)
    assert "x" not in names


def test_images_are_scored_one_by_one() -> None:
    truth = torch.tensor([[[0, 0], [1, 1]], [[0, 255], [2, 2]], [[255, 255], [255, 255]]])
    predicted = torch.tensor([[[0, 0], [1, 1]], [[0, 1], [2, 0]], [[0, 1], [2, 0]]])
    # The second: one of two pixels of class 0, and one of two of class 2; the pixel without a class does not count.
    assert image_scores(predicted, truth, 3).tolist() == [1.0, 0.5, -1.0]


def test_the_best_and_the_worst_are_kept_each_once() -> None:
    scores = torch.tensor([[number, (number * 7 % 40) / 40] for number in range(40)] + [[40, -1.0]])
    kept = best_and_worst(scores)
    assert [round(40 * score) for _, score in kept["best"]] == [39, 38, 37, 36, 35, 34]
    assert [round(40 * score) for _, score in kept["worst"]] == [0, 1, 2, 3, 4, 5]
    few = best_and_worst(scores[:3])
    assert (len(few["best"]), len(few["worst"])) == (2, 1)
    assert KEPT == 6


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("forked_python")
def test_both_ways_of_data_parallel_training_give_the_same_parameters() -> None:
    script = ROOT / "examples" / "segmentation" / "data_parallel.py"
    words = ("--devices", "2", "--size", "32", "--batch", "2", "--steps", "1", "--double")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"largest difference of their parameters: (\S+)", done.stdout)
    assert found is not None
    assert float(found[1]) < 1e-9
