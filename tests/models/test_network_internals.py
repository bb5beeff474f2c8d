"""Detects a change in the undocumented parts of torch and torchvision that the networks use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lit_mnist.distributed.torch_internals import affine_gradients, channel_statistics, weighted_sum


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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "expanded", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_weighted_sum_for_each_channel_whatever_the_number_of_samples(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str, threads: int
) -> None:
    # Two real threads would prevent later tests from forking.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    # The second shape is computed in several parts, the last of which is smaller.
    for shape in ((2, 3, 4, 5), (23, 8, 60, 61), (1, 2, 300, 300)):
        x, y = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
        of_x, of_y, offset = torch.randn(3, shape[1], 1, 1, dtype=torch.promote_types(dtype, torch.float32))
        if layout == "channels last":
            x, y = (values.to(memory_format=torch.channels_last) for values in (x, y))
        if layout == "expanded":
            x = torch.ones((), dtype=dtype).expand(shape)
        if layout == "transposed":
            x = x.transpose(2, 3).contiguous().transpose(2, 3)
        exact = (of_x * x.double() + offset + of_y * y.double()).to(dtype)
        found = weighted_sum(x, y, of_x.flatten(), of_y.flatten(), offset.flatten())
        torch.testing.assert_close(found, exact)
        assert found.stride() == torch.empty_like(x).stride()
