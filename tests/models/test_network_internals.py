"""Detects a change in the undocumented parts of torch and torchvision that the networks use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_mnist.distributed.torch_internals import affine, affine_gradients, channel_statistics
from lit_mnist.models.torch_internals import deeplab_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_statistics_are_mean_and_biased_variance(dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, 4, 5, dtype=torch.float64).to(dtype)
    mean, variance = channel_statistics(x)
    assert mean.dtype == variance.dtype == torch.promote_types(dtype, torch.float32)
    expected = torch.var_mean(x.double(), dim=(0, 2, 3), correction=0)
    torch.testing.assert_close((variance.double(), mean.double()), expected, rtol=1e-5, atol=1e-5)


def test_the_gradients_are_those_of_constant_statistics() -> None:
    x, grad = torch.randn(2, 6, 3, 4, 5, dtype=torch.float64)
    weight, bias, mean = torch.randn(3, 3, dtype=torch.float64)
    variance = torch.rand(3, dtype=torch.float64) + 0.5
    weight.requires_grad_()
    bias.requires_grad_()
    (F.batch_norm(x, mean, variance, weight, bias, eps=1e-5) * grad).sum().backward()
    found = affine_gradients(grad, x, weight.detach(), mean, variance, 1e-5)
    torch.testing.assert_close(found, (weight.grad, bias.grad))


def test_an_affine_map_of_each_channel() -> None:
    x, slope, offset = torch.randn(2, 3, 4, 5), torch.tensor([2.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, 3.0])
    torch.testing.assert_close(affine(x, slope, offset), slope.view(3, 1, 1) * x + offset.view(3, 1, 1))


def test_the_parts_of_a_deeplab_accept_the_same_arguments() -> None:
    pyramid, bottleneck = deeplab_parts()
    block = bottleneck(64, 16, 1, nn.Identity(), dilation=2)
    assert block(torch.randn(2, 64, 8, 8)).shape == (2, 16 * bottleneck.expansion, 8, 8)
    made = pyramid(64, (2, 4), 32)
    assert made(torch.randn(2, 64, 8, 8)).shape == (2, 32, 8, 8)
    assert isinstance(made.project[-1], nn.Dropout)
