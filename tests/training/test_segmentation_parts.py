"""DeepLabV3, the weights that it begins with, and mean IoU, each against a plain computation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, result_of, weights_of
from processes import assert_rejected
from test_segmentation import flags, voc
from torchvision.models import get_model, segmentation

from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.cli.experiment_checks import check_deterministic
from lit_mnist.data.dataset import IGNORED
from lit_mnist.distributed.rng import RandomKey
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, ModelSettings, Net
from lit_mnist.models.build import build_net
from lit_mnist.training.classifier import ClassifierMetrics
from lit_mnist.training.evaluation import Evaluation, EvaluationSums, predict_with_probability
from lit_mnist.training.weights import backbone_weights, read_weights

__all__ = ["flags", "voc"]

pytestmark = pytest.mark.timeout(200)
SMALL = ModelSettings(net="deeplabv3_small")


def plain_figures(logits: torch.Tensor, targets: torch.Tensor, classes: int) -> tuple[list[float | None], float, float]:
    """Returns each class's intersection over union, the accuracy and the loss, pixel by pixel."""
    predicted, true = logits.argmax(dim=1).numpy().ravel(), targets.numpy().ravel()
    counts = true != IGNORED
    predicted, true = predicted[counts], true[counts]
    iou: list[float | None] = []
    for kind in range(classes):
        either = ((predicted == kind) | (true == kind)).sum()
        iou.append(((predicted == kind) & (true == kind)).sum() / either if either else None)
    flat = logits.double().log_softmax(dim=1).permute(0, 2, 3, 1).reshape(-1, classes).numpy()[counts]
    return iou, float((predicted == true).mean()), -float(flat[np.arange(len(true)), true].mean())


@pytest.mark.parametrize("kind", ["sums", "torchmetrics"])
def test_mean_iou_is_that_of_all_pixels_that_count(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, 6, 9, generator=generator)
    logits[:, 4] = -99.0
    targets = torch.randint(0, 4, (7, 6, 9), generator=generator)
    targets[0] = targets[3, 2:] = IGNORED
    found: Evaluation
    sums, metrics = EvaluationSums(5, torch.device("cpu"), examples=True), ClassifierMetrics(5)
    for rows in (slice(0, 3), slice(3, 7)):
        sums.update(logits[rows], targets[rows], torch.arange(7)[rows])
        metrics.update(logits[rows], targets[rows])
    found = sums.compute(7) if kind == "sums" else metrics.evaluation()
    with pytest.raises(AssertionError, match="7 samples were evaluated"):
        sums.compute(8)
    assert sums.examples
    examples = sums.examples.gather()
    iou, accuracy, loss = plain_figures(logits, targets, 5)
    assert iou[4] is None
    assert found.iou == pytest.approx(iou)
    assert found.mean_iou == found.score == pytest.approx(np.mean([share for share in iou if share is not None]))
    assert found.accuracy == pytest.approx(accuracy)
    assert found.loss == pytest.approx(loss)
    assert found.count == 7
    assert np.sum(found.confusion) == int((targets != IGNORED).sum())
    # The image that is all border has no score of its own.
    assert {example.sample for example in examples} == {1, 2, 3, 4, 5, 6}
    assert "mean_iou" in found.to_dict()


def test_images_of_nothing_but_border_have_metrics() -> None:
    sums = EvaluationSums(3, torch.device("cpu"))
    sums.update(torch.randn(2, 3, 4, 4), torch.full((2, 4, 4), IGNORED), torch.arange(2))
    found = sums.compute(2)
    assert (found.mean_iou, found.loss, found.iou) == (0, 0, [None, None, None])


def test_digits_have_no_mean_iou() -> None:
    sums = EvaluationSums(3, torch.device("cpu"))
    sums.update(torch.randn(20, 3), torch.arange(20) % 3, torch.arange(20))
    found = sums.compute(20)
    assert found.score == found.accuracy
    assert not {"iou", "mean_iou"} & found.to_dict().keys()


def test_predictions_of_segmentation_images_are_masks() -> None:
    logits = torch.randn(2, 3, 4, 5)
    masks, probability = predict_with_probability(logits)
    assert (masks.dtype, masks.shape, probability.shape) == (torch.uint8, (2, 4, 5), (2,))
    assert torch.equal(masks.long(), logits.argmax(dim=1))


@pytest.mark.parametrize("net", ["deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50"])
def test_a_network_computes_what_torchvision_s_does(net: Net) -> None:
    own = build_net(ModelSettings(net=net), num_classes=5, seed=1).eval()
    other = getattr(segmentation, net)(weights=None, weights_backbone=None, num_classes=5, aux_loss=None).eval()
    other.load_state_dict(own.state_dict())
    images = torch.randn(2, 3, 50, 70, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(own(images), other(images)["out"], rtol=1e-4, atol=1e-5)


def test_dropout_is_a_function_of_the_draw_and_touches_no_generator() -> None:
    net = build_net(SMALL, num_classes=3, seed=1).train()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    first, again, other = (net(images, RandomKey(7, number, 4, torch.arange(4))) for number in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-3)
    with pytest.raises(ValueError, match="rng"):
        net(images)


@pytest.mark.parametrize("net", ["deeplabv3_small", "deeplabv3_mobilenet_v3_large"])
def test_activations_that_are_computed_twice_give_the_same_gradient_and_statistics(net: Net) -> None:
    images = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    found = []
    for again in (False, True):
        made = build_net(ModelSettings(net=net, checkpoint_activations=again), num_classes=3, seed=1).train()
        made(images, RandomKey(7, 0, 3, torch.arange(3))).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in made.named_parameters()}
        found.append({**dict(made.named_buffers()), **gradients})
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert tensor is not None
        assert torch.equal(tensor, found[1][name]), name
    assert {int(counted) for name, counted in made.named_buffers() if name.endswith("num_batches_tracked")} == {1}


@pytest.mark.parametrize("net", ["deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "deeplabv3_resnet101"])
def test_every_weight_of_a_backbone_has_its_published_one(net: Net) -> None:
    settings = ModelSettings(net=net, weights="backbone")
    with torch.device("meta"):
        published = get_model(net.removeprefix("deeplabv3_"), weights=None).state_dict()
        own = build_net(settings, num_classes=21, seed=1).state_dict()
    found = backbone_weights(settings, published)
    assert found.keys() == {name for name in own if name.startswith("backbone.")}
    assert all(found[name].shape == own[name].shape for name in found)


def test_weights_are_taken_from_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    wanted = build_net(SMALL, num_classes=3, seed=9).state_dict()
    torch.save(wanted, tmp_path / "plain.pt")
    torch.save({**wanted, "aux_classifier.0.weight": torch.zeros(1)}, tmp_path / "torchvision.pth")
    save_file({name: tensor.contiguous() for name, tensor in wanted.items()}, tmp_path / "safe.safetensors")
    for path in sorted(tmp_path.iterdir()):
        weights = read_weights(replace(SMALL, weights=str(path)), num_classes=3)
        found = build_net(SMALL, num_classes=3, seed=1, weights=weights).state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), path
    assert read_weights(SMALL, num_classes=3) is None


DAMAGES = {
    "other classes": ({"classifier.4.weight": torch.zeros(9, 64, 1, 1)}, "classifier.4.weight with the shape"),
    "another name": ({"fc.weight": torch.zeros(1)}, "has fc.weight, which no such network has"),
    "no tensor": ({"backbone.conv1.weight": "text"}, "backbone.conv1.weight"),
    "no number": ({"classifier.4.bias": torch.full((3,), torch.nan)}, "classifier.4.bias that are infinite or NaN"),
    "whole numbers": ({"classifier.4.bias": torch.zeros(3, dtype=torch.int32)}, "classifier.4.bias as torch.int32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_another_network_are_refused(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    path = tmp_path / "weights.pt"
    torch.save({**build_net(SMALL, num_classes=3, seed=9).state_dict(), **change}, path)
    with pytest.raises(InputError, match=message):
        read_weights(replace(SMALL, weights=str(path)), num_classes=3)


def test_wrapped_weights_are_refused_by_what_they_have_and_lack(tmp_path: Path) -> None:
    weights = build_net(SMALL, num_classes=3, seed=9).state_dict()
    path = tmp_path / "weights.pt"
    torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    with pytest.raises(InputError, match=r"lacks backbone\.conv1\.weight, and has module\.backbone\.conv1\.weight"):
        read_weights(replace(SMALL, weights=str(path)), num_classes=3)


def test_weights_in_torch_s_old_form_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(build_net(SMALL, num_classes=3, seed=9).state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match=r"torch\.save\(net\.state_dict\(\), FILE\) writes, of torch 1\.6 or newer"):
        read_weights(replace(SMALL, weights=str(path)), num_classes=3)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\3\4" + bytes(100)])
def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"weights\.(pt|safetensors)"):
        read_weights(replace(SMALL, weights=str(path)), num_classes=3)


@pytest.mark.parametrize(
    ("name", "kind", "fails"), [("shapes", "cuda", True), ("shapes", "cpu", False), ("mnist", "cuda", False)]
)
def test_deterministic_is_refused_where_torch_cannot_be(name: Any, kind: str, fails: bool) -> None:
    experiment = Experiment().replace("data", name=name).replace("trainer", deterministic=True)
    with pytest.raises(InputError, match="no deterministic per-pixel loss") if fails else nullcontext():
        check_deterministic(experiment, kind)


def test_a_training_begins_with_the_weights_of_another_and_does_not_need_them_again(
    program: Program, flags: tuple[object, ...]
) -> None:
    first = program.train("fit", *flags, "--max-steps", 1, "--precision", "32-true", engine="raw_ddp")
    checkpoint = first / "checkpoints" / "last.ckpt"
    still = ("--lr", 1e-30, "--model.schedule", "constant", "--model.weights", checkpoint, "--max-steps", 2)
    for engine, ranks in (("raw_ddp", 1), ("lightning", 2)):
        second = program.train("fit", *flags, *still, "--devices", ranks, "--precision", "32-true", engine=engine)
        old, new = weights_of(first), weights_of(second)
        moved = [name for name in old if not torch.equal(old[name], new[name])]
        assert all("running_" in name or "num_batches" in name for name in moved)
    checkpoint.rename(program.folder / "aside")
    done = program("test", "--ckpt", second, "--data.root", result_of(second)["config"]["data"]["root"])
    assert done.code == 0, done.out + done.err
    assert "state_dict" in read_checkpoint(second / "checkpoints" / "last.ckpt")
    assert_rejected(program(*flags, "--model.weights", checkpoint), "last.ckpt")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resnet101_takes_a_step_of_two_images(program: Program, flags: tuple[object, ...]) -> None:
    few = ("--model.net", "deeplabv3_resnet101", "--data.image_size", 256, "--batch-size", 2, "--max-steps", 1)
    folder = program.train(
        "fit", *flags, *few, "--data.val_size", 0, "--precision", "32-true", engine="single", timeout=400
    )
    result = result_of(folder)
    assert result["steps"] == 1
    assert result["peak_memory_bytes"] < 8 * 2**30
