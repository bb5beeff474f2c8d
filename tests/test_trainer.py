"""LitTrainer, a stock Trainer, and the private parts of Lightning."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.accelerators import CUDAAccelerator

from lit_mnist import LitClassifier, LitTrainer, MNISTDataModule
from lit_mnist.plugins import PortableSyncBatchNorm
from lit_mnist.trainer import choose_devices

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
RUN: dict[str, Any] = {"max_steps": 12, "limit_val_batches": 0, "accelerator": "cpu", **QUIET}


class WithQueue(LitClassifier):
    """Keeps the mean of each rank's last batch in a buffer, which DDP replaces by that of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.queue)
        self.queue.copy_(batch[0].float().mean())
        return loss


def trained(kind: str, module_class: type[LitClassifier]) -> dict[str, torch.Tensor]:
    """Returns the weights after 12 steps; under a stock Trainer, with the one plugin that torch lacks on CPUs."""
    seed_everything(42)
    ranks = dist.get_world_size()
    if kind == "stock":
        options = {"plugins": [PortableSyncBatchNorm()], "strategy": "ddp"} if ranks > 1 else {}
        trainer = Trainer(devices=ranks, use_distributed_sampler=False, enable_checkpointing=False, **options, **RUN)
    else:
        trainer = LitTrainer(devices=ranks, precision="32-true", **RUN)
    module = module_class()
    if kind == "stock":
        module.to(memory_format=torch.channels_last)
    trainer.fit(module, datamodule=MNISTDataModule())
    assert trainer.global_step == 12
    return {name: tensor.contiguous() for name, tensor in module.net.state_dict().items()}


@pytest.mark.parametrize(("count", "module"), [(1, LitClassifier), (2, LitClassifier), (2, WithQueue)])
def test_a_stock_trainer_trains_what_lit_trainer_trains(
    ranks: Callable[..., list[Any]], count: int, module: type[LitClassifier]
) -> None:
    stock, ours = ranks(count, trained, "stock", module), ranks(count, trained, "lit", module)
    for name, tensor in stock[0].items():
        assert torch.equal(tensor, ours[0][name]), name
        assert torch.equal(ours[0][name], ours[-1][name]), name


def broadcasts(steps: int) -> int:
    """Returns how many broadcasts a LitTrainer has in a number of steps, and around them."""
    trainer = LitTrainer(
        devices=2, precision="32-true", max_steps=steps, limit_val_batches=0, enable_checkpointing=False, **QUIET
    )
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        trainer.fit(LitClassifier(), datamodule=MNISTDataModule())
    return int(broadcast.call_count)


@pytest.mark.parametrize(("devices", "chosen"), [("auto", ("cuda", 1)), (1, ("cuda", 1)), (2, ("cpu", 2))])
def test_ranks_without_a_gpu_for_each_train_on_the_cpu(devices: Any, chosen: tuple[str, int]) -> None:
    with (
        patch.object(CUDAAccelerator, "is_available", return_value=True),
        patch.object(CUDAAccelerator, "auto_device_count", return_value=1),
        patch.object(CUDAAccelerator, "parse_devices", return_value=[0]),
    ):
        assert choose_devices("auto", devices) == chosen


def test_no_broadcast_in_a_step(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, broadcasts, 5) == ranks(2, broadcasts, 9)
