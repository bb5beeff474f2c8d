"""A checkpoint callback whose runs resume bit-identically, at any step, with any module, under any Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_mnist.distributed.consensus import Consensus
from lit_mnist.distributed.gather import all_gather_bytes
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.errors import InputError
from lit_mnist.plugins._private import TrainerState, uses_dataloader_iter
from lit_mnist.plugins.local_state import (
    find_generators,
    generator_state,
    pack,
    plain_attributes,
    process_generators,
    restore_attributes,
    restore_generator,
    restore_process_generators,
    unpack,
)
from lit_mnist.plugins.replay import ReplayLoader

_KEY = "ExactCheckpoint"


class ExactCheckpoint(Checkpoint):
    """Saves `last.ckpt` between two batches, with everything that the rest of the training depends on.

    Args:
        dirpath: The folder of `last.ckpt`.
        every_n_train_steps: Optimizer steps between two saves.

    A resumed training ends with the weights, the optimizer and the metrics of an uninterrupted one:

        exact = ExactCheckpoint("checkpoints", every_n_train_steps=100)
        trainer = Trainer(callbacks=[exact])
        trainer.fit(module, ckpt_path=exact.last)
    """

    def __init__(self, dirpath: str | Path, every_n_train_steps: int = 100) -> None:
        if every_n_train_steps < 1:
            raise InputError(f"every_n_train_steps must be at least 1, but is {every_n_train_steps}.")
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_train_steps = every_n_train_steps
        self._loaders: list[ReplayLoader] = []
        self._saving = False
        self._saved_step = -1
        self._pending: dict[str, Any] | None = None
        self._stage = ""
        self._ended = False

    @property
    def last(self) -> Path | None:
        """The checkpoint to resume from, for `ckpt_path`; None if there is none yet."""
        return self.path if self.path.exists() else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if uses_dataloader_iter(pl_module):
            raise InputError(
                "ExactCheckpoint cannot restore a training_step(dataloader_iter): how many batches it has taken is not "
                "known. Use training_step(batch, batch_idx)."
            )
        self.trainer = trainer
        self._loaders = []
        wrapped = trainer.strategy.process_dataloader
        def process(loader: object) -> object:
            loader = wrapped(loader)
            if not trainer.training:
                return loader
            self._loaders.append(ReplayLoader(loader, self._before_fetch))
            if self._pending is not None and self._pending["loaders"][len(self._loaders) - 1]:
                self._loaders[-1].resume(self._pending["loaders"][len(self._loaders) - 1])
            return self._loaders[-1]
        trainer.strategy.process_dataloader = process

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._state = TrainerState(trainer)
        self._initial = plain_attributes(pl_module)
        rank = Rank(trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices)
        self._consensus = Consensus(rank, trainer.strategy.root_device)
        self._batches = 0
        STOP.listen()
        STOP._deferred = True

    def _before_fetch(self, loader: ReplayLoader) -> None:
        trainer = self.trainer
        if loader is not self._loaders[0]:
            return
        if self._pending is not None and self._stage != "in flight":
            for each in self._loaders:
                each.replay()
            if self._pending["in_flight"]:
                restore_process_generators(self._pending["before_in_flight"])
                self._stage = "in flight"
                return
        if self._pending is not None:
            self._restore()
            return
        in_flight = self._in_flight()
        if loader.delivered < in_flight or (in_flight and loader.delivered == 0):
            return
        used = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if trainer.lightning_module.automatic_optimization and used % trainer.accumulate_grad_batches:
            return
        self._batches += 1
        decision = self._consensus.step_done(self._batches, STOP.received, save=False)
        if trainer.global_step - max(self._saved_step, 0) >= self.every_n_train_steps or decision.stop:
            self._save()
        if decision.stop:
            if trainer.is_global_zero:
                print(f"Stopped by {decision.stop.name} after step {trainer.global_step}; saved {self.path}.", file=sys.stderr)
            raise SystemExit(128 + decision.stop)

    def _in_flight(self) -> int:
        return self._state.prefetches

    def on_train_batch_end(self, *args) -> None:
        self._state.merge()

    def on_train_epoch_end(self, *args) -> None:
        self._state.merge()

    def on_train_end(self, trainer, pl_module) -> None:
        self._ended = True
        self._save()

    def _save(self) -> None:
        self._saving = True
        try:
            self.trainer.save_checkpoint(self.path)
        finally:
            self._saving = False
        self._saved_step = self.trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._saving:
            return
        content = torch.frombuffer(bytearray(pack(self._local_state(trainer, pl_module))), dtype=torch.uint8)
        ranks = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in all_gather_bytes(bytes(content.numpy()))]
        checkpoint[_KEY] = {"ranks": ranks}

    def _local_state(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        now = plain_attributes(pl_module)
        changed = {k: torch.frombuffer(bytearray(v), dtype=torch.uint8) for k, v in now.items() if self._initial.get(k) != v}
        in_flight = self._in_flight() if self._loaders and self._loaders[0].delivered and not self._ended else 0
        grads = {}
        if not pl_module.automatic_optimization:
            grads = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
        return {
            "loaders": [None if self._ended else loader.position(in_flight) for loader in self._loaders],
            "in_flight": in_flight,
            "before_in_flight": self._loaders[0].before_last if in_flight else None,
            "process": process_generators(),
            "own": {path: generator_state(g) for path, g in find_generators(pl_module)},
            "attributes": changed,
            "grads": grads,
            "trainer": self._state.save(),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        if _KEY not in checkpoint:
            raise InputError("not saved by ExactCheckpoint")
        ranks = checkpoint[_KEY]["ranks"]
        if len(ranks) != trainer.world_size:
            raise InputError(f"saved by {len(ranks)} ranks, here {trainer.world_size}")
        self._pending = unpack(ranks[trainer.global_rank].numpy().tobytes(), trainer.strategy.root_device)
        self._saved_step = checkpoint["global_step"]

    def _restore(self) -> None:
        state, self._pending, self._stage = self._pending, None, ""
        module = self.trainer.lightning_module
        restore_attributes(module, {k: v.numpy().tobytes() for k, v in state["attributes"].items()}, module.device)
        params = dict(module.named_parameters())
        for n, g in state["grads"].items():
            params[n].grad = g
        self._state.load(state["trainer"])
        for path, g in find_generators(module):
            if path in state["own"]:
                restore_generator(g, state["own"][path])
        restore_process_generators(state["process"])
        self._batches = 0
