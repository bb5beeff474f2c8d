"""The networks, synchronized batch norm, dropout, augmentation and random numbers."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from conftest import on_ranks
from torch import nn

from lit_mnist.data.digits.split import augment
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rng import RandomKey, permutation, uniform
from lit_mnist.distributed.sync_batch_norm import BatchNormOverRanks2d, sync_batch_norm, unsync_batch_norm
from lit_mnist.experiment import DataSettings, ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.models.layers import SeededDropout
from lit_mnist.training import schedule as schedules
from lit_mnist.training.evaluation_loop import EvaluationSums
from lit_mnist.training.examples import MISTAKES_KEPT, Wrong
from lit_mnist.training.schedule import lr_factor


def test_sizes_of_the_networks() -> None:
    sizes = {
        name: sum(p.numel() for p in build_net(ModelSettings(net=name), num_classes=10, seed=0).parameters())  # type: ignore[arg-type]
        for name in ("convnet", "basicnet")
    }
    assert sizes == {"convnet": 29_034, "basicnet": 1_199_882}


def test_initial_weights_depend_on_the_seed_alone() -> None:
    def weight(seed: int) -> torch.Tensor:
        return build_net(ModelSettings(), num_classes=10, seed=seed).state_dict()["fc.weight"]

    first = weight(1)
    state = torch.random.get_rng_state()
    torch.rand(7)
    assert torch.equal(weight(1), first)
    assert not torch.equal(weight(2), first)
    torch.random.set_rng_state(state)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_batch_norm_over_uneven_ranks_matches_one_batch(tmp_path: Path, offset: float) -> None:
    """Output, gradients and running buffers, in double precision, also where the mean dwarfs the deviation."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(17, 3, 5, 4, generator=generator, dtype=torch.float64) + offset
    target = torch.randn(17, 3, 5, 4, generator=generator, dtype=torch.float64)
    parts = [slice(0, 2), slice(2, 3), slice(3, 17)]

    def step(norm: nn.Module, rows: slice) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
        own = images[rows].clone().requires_grad_()
        out = norm(own)
        (out * target[rows]).sum().backward()
        assert own.grad is not None
        return out.detach(), own.grad, norm

    def norm() -> nn.BatchNorm2d:
        made = nn.BatchNorm2d(3, momentum=0.3).double()
        nn.init.uniform_(made.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(1))
        return made

    def work(rank: Rank) -> None:
        out, grad, synced = step(sync_batch_norm(nn.Sequential(norm()), "cpu"), parts[rank.rank])
        weights = {name: parameter.grad for name, parameter in synced.named_parameters()}
        torch.save((out, grad, weights, synced.state_dict()), tmp_path / f"{rank.rank}.pt")

    on_ranks(work, tmp_path, 3)
    out, grad, whole = step(nn.Sequential(norm()), slice(0, 17))
    outs, grads, weights, states = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(3)), strict=True)
    scale = 1e-11 if offset == 0 else 1e-7
    assert torch.allclose(torch.cat(outs), out, atol=scale, rtol=0)
    assert torch.allclose(torch.cat(grads), grad, atol=scale, rtol=0)
    for name, parameter in whole.named_parameters():
        assert torch.allclose(sum(part[name] for part in weights), parameter.grad, rtol=1e-7)  # type: ignore[arg-type]
    for state in states:
        assert state.keys() == whole.state_dict().keys()
        for name, value in whole.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-10)


@pytest.mark.parametrize("true_16_bit", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_gradient_of_16_bit_sync_batch_norm_is_as_exact_as_torch(
    tmp_path: Path, dtype: torch.dtype, offset: float, true_16_bit: bool
) -> None:
    """Against double precision, where the mean dwarfs the deviation and the gradient follows the input."""
    generator = torch.Generator().manual_seed(0)
    noise, deviation = torch.randn(2, 24, 4, 14, 14, generator=generator, dtype=torch.float64)
    images, target = (deviation + offset).to(dtype), (10 * deviation + noise).to(dtype)
    parts = [slice(0, 9), slice(9, 24)]
    of_layer = dtype if true_16_bit else torch.float32

    def gradient(norm: nn.Module, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        own, grad = (part[rows].to(dtype, memory_format=torch.channels_last) for part in (images, target))
        norm(own.requires_grad_()).backward(grad)
        assert own.grad is not None
        assert own.grad.dtype == dtype
        return own.grad

    def work(rank: Rank) -> None:
        norm = sync_batch_norm(nn.Sequential(nn.BatchNorm2d(4).to(of_layer)), "cpu")
        torch.save(gradient(norm, parts[rank.rank], dtype), tmp_path / f"{rank.rank}.pt")

    on_ranks(work, tmp_path, 2)
    exact = gradient(nn.BatchNorm2d(4).double(), slice(0, 24), torch.float64)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    ours = torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])
    assert error(ours) <= 1.01 * error(gradient(nn.BatchNorm2d(4).to(of_layer), slice(0, 24), dtype))


def test_sync_batch_norm_accepts_and_rejects_what_batch_norm_does(tmp_path: Path) -> None:
    """Layers without a bias, the compiler, and saving the network in the middle of a training, as on one rank."""
    images = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))

    def layer() -> nn.BatchNorm1d:
        norm = nn.BatchNorm1d(3)
        # As with `bias=False`, which older releases of torch do not have.
        norm.bias = None  # type: ignore[assignment]
        return norm

    def work(rank: Rank) -> None:
        net, own = sync_batch_norm(nn.Sequential(layer()), "cpu"), images[3 * rank.rank :][:3]
        outputs = [net(own)]
        torch.save(net, tmp_path / f"{rank.rank} net.pt")
        outputs.append(torch.load(tmp_path / f"{rank.rank} net.pt", weights_only=False)(own))
        outputs.append(torch.compile(net, backend="eager")(own))
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            net(own.view(3, 3, 1, 1))
        torch.save([each.detach() for each in outputs], tmp_path / f"{rank.rank}.pt")

    on_ranks(work, tmp_path, 2)
    whole = layer()(images).detach()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first) == 3
    for parts in zip(first, second, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole)


def test_sync_batch_norm_shares_parameters_and_can_be_undone() -> None:
    net = build_net(ModelSettings(), num_classes=10, seed=0)
    weight = net.layer1[1].weight
    state = {name: value.clone() for name, value in net.state_dict().items()}
    sync_batch_norm(net, "cpu")
    assert isinstance(net.layer1[1], BatchNormOverRanks2d)
    assert net.layer1[1].weight is weight
    assert net.state_dict().keys() == state.keys()
    unsync_batch_norm(net)
    assert type(net.layer1[1]) is nn.BatchNorm2d
    assert net.layer1[1].weight is weight


def test_dropout_gives_each_sample_the_mask_of_the_whole_batch() -> None:
    layer, ones = SeededDropout(0.4, layer=3), torch.ones(12, 50)
    whole = layer(ones, RandomKey(5, 7, 12, torch.arange(12)))
    parts = [layer(ones[:4], RandomKey(5, 7, 12, torch.arange(start, start + 4))) for start in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(layer(ones, RandomKey(5, 8, 12, torch.arange(12))), whole)
    assert not torch.equal(SeededDropout(0.4, layer=4)(ones, RandomKey(5, 7, 12, torch.arange(12))), whole)
    assert whole.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert torch.equal(layer.eval()(ones, None), ones)
    with pytest.raises(ValueError, match="rng"):
        layer.train()(ones, None)


@pytest.mark.parametrize("kind", ["shift", "affine"])
def test_augmentation_is_a_function_of_seed_epoch_and_sample(kind: str) -> None:
    settings = DataSettings(augment=kind)  # type: ignore[arg-type]
    images = torch.rand(6, 1, 28, 28, dtype=torch.float64)
    indices = np.array([3, 1, 4, 15, 9, 2])
    whole = augment(images, indices, settings=settings, seed=1, epoch=2)
    alone = augment(images[3:4], indices[3:4], settings=settings, seed=1, epoch=2)
    assert torch.allclose(alone[0], whole[3], atol=1e-12)
    for seed, epoch in ((2, 2), (1, 3)):
        assert not torch.allclose(augment(images, indices, settings=settings, seed=seed, epoch=epoch), whole)


def test_a_shift_moves_whole_pixels_up_to_the_maximum() -> None:
    images = torch.zeros(500, 1, 28, 28)
    images[:, 0, 14, 14] = 1
    moved = augment(images, np.arange(500), settings=DataSettings(augment="shift", max_shift=2), seed=0, epoch=0)
    assert torch.equal(moved.sum(dim=(1, 2, 3)), torch.ones(500))
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in range(12, 17) for column in range(12, 17)}


def test_random_numbers_are_uniform_and_independent() -> None:
    numbers = uniform(1, "a", np.arange(100_000))
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, uniform(1, "b", np.arange(100_000)))[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, uniform(2, "a", np.arange(100_000)))[0, 1]) < 0.02
    assert sorted(permutation(1, "order", 1000)) == list(range(1000))


def test_metrics_match_torchmetrics() -> None:
    from torchmetrics.functional.classification import multiclass_accuracy

    logits, targets = torch.randn(500, 5), torch.randint(0, 4, (500,))
    metrics = EvaluationSums(5, torch.device("cpu"), examples=True)
    for rows in (slice(0, 300), slice(300, 500)):
        metrics.update(logits[rows], targets[rows], torch.arange(500)[rows])
    found = metrics.compute(500)
    assert found.accuracy == pytest.approx(float(multiclass_accuracy(logits, targets, 5, average="micro")))
    expected = multiclass_accuracy(logits, targets, 5, average="none")
    assert found.per_class == pytest.approx(expected.tolist())
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(logits, targets)))
    assert metrics.examples
    wrong = metrics.examples.gather()
    probability, predicted = logits.softmax(dim=1).max(dim=1)
    errors = [n for n in range(500) if predicted[n] != targets[n]]
    surest = sorted(errors, key=lambda n: -float(probability[n]))[:MISTAKES_KEPT]
    assert len(errors) > MISTAKES_KEPT
    assert all(isinstance(item, Wrong) for item in wrong)
    assert [item.sample for item in wrong] == surest
    assert [item.predicted for item in wrong] == [int(predicted[n]) for n in surest]
    assert [item.probability for item in wrong] == pytest.approx([float(probability[n]) for n in surest])
    with pytest.raises(AssertionError, match="500 samples were evaluated"):
        metrics.compute(501)


@pytest.mark.parametrize("schedule", ["constant", "onecycle", "cosine", "polynomial"])
@pytest.mark.parametrize("warmup", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("total", [1, 2, 400])
def test_a_schedule_stays_between_zero_and_its_peak(schedule: str, warmup: float | None, total: int) -> None:
    settings = ModelSettings(schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
    factors = [lr_factor(settings, step, total) for step in range(total + 3)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert max(factors[:total]) == pytest.approx(1, abs=0.01)
    if schedule == "onecycle" and total == 400 and warmup is None:
        assert factors[0] < 0.06
        assert factors.index(max(factors)) in {99, 100}
        assert factors[399] < 0.01


def test_the_learning_rates_in_the_docstring_of_the_schedule_are_correct() -> None:
    found = doctest.testmod(schedules, verbose=False)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("net", ["convnet", "basicnet"])
def test_a_compiled_network_is_the_same_function(net: Literal["convnet", "basicnet"]) -> None:
    images = torch.randn(32, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    gradients = []
    for compiled in (False, True):
        made = build_net(ModelSettings(net=net, compile=compiled), num_classes=10, seed=3)
        made(images, RandomKey(1, 0, 32, torch.arange(32))).square().sum().backward()
        gradients.append({name: p.grad for name, p in made.named_parameters() if p.grad is not None})
    # Of the whole gradient: that of a bias before batch norm is zero but for rounding.
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    assert set(gradients[0]) == set(gradients[1]) == {name for name, _ in made.named_parameters()}
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=0, atol=1e-4 * largest), name


@pytest.mark.parametrize("views", [5, 9])
@pytest.mark.parametrize("net", ["convnet", "basicnet"])
def test_views_are_the_image_and_its_shifted_copies_in_evaluation_alone(
    net: Literal["convnet", "basicnet"], views: Literal[5, 9]
) -> None:
    plain = build_net(ModelSettings(net=net, dropout=0.0), num_classes=10, seed=3)
    several = build_net(ModelSettings(net=net, dropout=0.0, views=views), num_classes=10, seed=3)
    images = torch.zeros(6, 1, 28, 28)
    images[:, :, 8:20, 8:20] = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    rng = RandomKey(1, 0, 6, torch.arange(6))
    assert torch.equal(plain(images, rng), several(images, rng))
    plain.eval(), several.eval()
    with torch.no_grad():
        shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1) if views == 9 or 0 in {down, right}]
        shifted = [images.roll(by, (2, 3)) for by in shifts]
        assert len(shifted) == views
        expected = torch.stack([plain(view) for view in shifted]).mean(dim=0)
        assert torch.allclose(several(images), expected, atol=1e-5)
        assert not torch.allclose(several(images), plain(images), atol=1e-3)
