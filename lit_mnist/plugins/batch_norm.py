"""Synchronized batch norm on every backend."""

from __future__ import annotations

import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_mnist.distributed.gather import end_collectives_at_exit
from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.distributed.sync_batch_norm import OVER_RANKS, BatchNormOverRanks, sync_batch_norm, unsync_batch_norm
from lit_mnist.errors import require
from lit_mnist.plugins.not_callbacks import NotACallback


class PortableSyncBatchNorm(LayerSync, NotACallback):
    """Batch norm over the samples of all ranks, including on CPUs, where `Trainer(sync_batchnorm=True)` fails.

    During a fit, each `nn.BatchNorm1d`, `2d` and `3d` uses the statistics of all ranks. Output, gradients and running
    buffers are those of one rank with the whole batch. On GPUs with NCCL, `torch.nn.SyncBatchNorm` is used:

        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", plugins=[PortableSyncBatchNorm()])

    Leave `sync_batchnorm` unset: Lightning accepts one or the other. Each rank needs at least one sample per batch.
    Layers of other classes that derive from batch norm are not synchronized on CPUs, and a warning names them.

    Args:
        timeout: Seconds that a rank waits for the others on CPUs. GPUs use the timeout of the process group.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        require(timeout > 0, f"timeout must be positive, but is {timeout}.")
        self.timeout = timeout
        self._exchanges: list[PeerExchange] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronizes the batch norm layers of a model, and returns it."""
        if _has_gpus():
            return TorchSyncBatchNorm().apply(model)
        for name, layer in model.named_modules():
            if isinstance(layer, tuple(OVER_RANKS)) and type(layer) not in {*OVER_RANKS, *OVER_RANKS.values()}:
                rank_zero_warn(f"PortableSyncBatchNorm does not synchronize {name}, a {type(layer).__name__}.")
        end_collectives_at_exit()
        synchronized = sync_batch_norm(model, "cpu", self.timeout)
        # Lightning also reverts after an error. The connections to the other ranks must stay open until this rank has
        # written its failure report.
        layers = (layer for layer in synchronized.modules() if isinstance(layer, BatchNormOverRanks))
        self._exchanges = [layer.exchange for layer in layers]
        return synchronized

    def revert(self, model: nn.Module) -> nn.Module:
        """Undoes `apply`."""
        return TorchSyncBatchNorm().revert(model) if _has_gpus() else unsync_batch_norm(model)


def _has_gpus() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend_config()
