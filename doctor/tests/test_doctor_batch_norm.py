"""The batch norm over all ranks, with which the doctor proves LD012, computes what one process does."""

from __future__ import annotations

from pathlib import Path

import torch
from doctor_support import on_ranks
from torch import nn
from torch.distributed import get_rank

from ddp_doctor.probes.modules import synchronize

SHAPES = {nn.BatchNorm1d: (5, 3), nn.BatchNorm2d: (5, 3, 4, 2), nn.BatchNorm3d: (5, 3, 2, 2, 2)}


def outputs_of(norm: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the outputs, and the gradients of the inputs for a loss that is no mean over samples."""
    x = x.clone().requires_grad_()
    y = norm(x)
    (y.sigmoid() ** 2).sum().backward()
    return [y.detach(), x.grad if x.grad is not None else x]


def compare(_: object) -> None:
    for kind, shape in SHAPES.items():
        for affine in (True, False):
            norm = kind(3, affine=affine).double()
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 10
            expected = outputs_of(kind(3, affine=affine).double(), whole)
            synchronize(nn.Sequential(norm))
            # Uneven parts of the batch.
            part = slice(0, 3) if get_rank() == 0 else slice(3, 5)
            for found, right in zip(outputs_of(norm, whole[part]), expected, strict=True):
                torch.testing.assert_close(found, right[part], rtol=1e-10, atol=1e-12)
            norm.eval()
            torch.testing.assert_close(norm(whole), whole / (1 + norm.eps) ** 0.5)


def test_two_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    on_ranks(compare, tmp_path, 2)
