"""A checkpoint callback whose runs resume bit-identically, at any step, with any module, under any Trainer."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision

from lit_mnist.distributed.consensus import Consensus
from lit_mnist.distributed.gather import all_gather_bytes, end_collectives_at_exit
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_stop
from lit_mnist.errors import InputError, require
from lit_mnist.plugins import lightning_internals
from lit_mnist.plugins.exact_checks import (
    check_ranks,
    check_training,
    default_checkpoint_io,
    digest_of_rank_0,
)
from lit_mnist.plugins.folder_lock import locked
from lit_mnist.plugins.module_state import ModuleState
from lit_mnist.plugins.plain_values import as_bytes, as_tensor, pack, unpack
from lit_mnist.plugins.train_loaders import TrainLoaders

_KEY = "ExactCheckpoint"


class ExactCheckpoint(Checkpoint):
    """Saves `last.ckpt` so that a resumed training ends with the bits of an uninterrupted one, for any module.

    It saves between two batches, and at the end. At SIGTERM, SIGINT, SIGUSR1 or SIGHUP on any rank, all ranks save
    together and exit with the code 128 + signal. Resume with the same number of ranks; `last` is None at the start:

        exact = ExactCheckpoint("checkpoints", every_n_train_steps=100)
        trainer = Trainer(max_epochs=3, callbacks=[exact])
        trainer.fit(module, ckpt_path=exact.last)

    It cannot restore iterators without a state, generators that only a closure refers to, states inside a library or
    C++ code, and what CUDA computes in a different order each time (`deterministic=True`).

    Args:
        dirpath: Folder of `last.ckpt`.
        every_n_train_steps: Number of optimizer steps between two saves.
    """

    def __init__(self, dirpath: str | Path, every_n_train_steps: int = 100) -> None:
        require(every_n_train_steps >= 1, f"every_n_train_steps must be at least 1, not {every_n_train_steps}.")
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_train_steps = every_n_train_steps
        self._open = ExitStack()

    @property
    def last(self) -> Path | None:
        """The checkpoint to resume from, for `ckpt_path`; None if there is none yet."""
        return self.path if self.path.exists() else None

    @property
    def best_model_path(self) -> str:
        """The best checkpoint of a `ModelCheckpoint` beside this callback, for `ckpt_path="best"`."""
        others = [each for each in self._trainer.callbacks if isinstance(each, ModelCheckpoint)]  # type: ignore[attr-defined]
        return others[0].best_model_path if others else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepares a fit, and rejects what cannot be restored."""
        self._trainer = trainer
        if stage != "fit":
            return
        check_training(trainer, pl_module)
        if isinstance(trainer.precision_plugin, DoublePrecision):
            # Lightning loads a checkpoint's weights before it converts the module, and so into 32 bits.
            pl_module.double()
        self._close()
        self._lock(trainer)
        self._io = default_checkpoint_io(trainer)
        self._pending: dict[str, Any] | None = None
        self._saving, self._ended, self._saved_step, self._batches = False, False, 0, 0
        self._loaders = TrainLoaders(trainer, self._between_batches, self._restore)
        self._loaders.attach(self._open)
        self._open.enter_context(lightning_internals.handles_no_signals(trainer))
        # Until the checkpoint is loaded.
        self._loading = ExitStack()
        self._loading.enter_context(self._own_io())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Reads this rank's part.

        Raises:
            InputError: The checkpoint was not saved by this callback, or by another number of ranks.
        """
        if trainer.state.fn != "fit":
            return
        check_saved(checkpoint, trainer.world_size)
        self._pending = unpack(as_bytes(checkpoint[_KEY]["ranks"][trainer.global_rank]), trainer.strategy.root_device)
        self._loaders.resume_from(self._pending["loaders"])
        self._saved_step = checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to record signals instead of exiting at once."""
        self._loading.close()
        self._state, self._module_state = lightning_internals.TrainerState(trainer), ModuleState(pl_module)
        if self._pending is not None:
            lightning_internals.skip_restart_logic(trainer)
        rank = Rank(trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices)
        end_collectives_at_exit()
        self._consensus = Consensus(rank, trainer.strategy.root_device)
        self._open.enter_context(STOP.listening())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the end of the training."""
        self._ended = True
        self._save()
        self._exit_if_stopped(self._consensus.decide(self._batches, STOP.received_signal).stop)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the Trainer and the signal handlers."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the Trainer and the signal handlers."""
        self._close()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds each rank's part to the checkpoints of this callback."""
        if not self._saving:
            return
        digest = digest_of_rank_0(trainer, checkpoint["lr_schedulers"])
        parts = all_gather_bytes(digest + pack(self._local_state()))
        check_ranks([part[: len(digest)] for part in parts], trainer)
        checkpoint[_KEY] = {"ranks": [as_tensor(part[len(digest) :]) for part in parts]}

    def _between_batches(self) -> None:
        """Saves if a save is due, and exits if any rank has received a signal."""
        trainer = self._trainer
        used = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        window = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        if used % window:
            return
        self._batches += 1
        decision = self._consensus.on_step_end(self._batches, STOP.received_signal, save=self._wants_save())
        if decision.stop or decision.save or trainer.global_step - self._saved_step >= self.every_n_train_steps:
            self._save()
        self._exit_if_stopped(decision.stop)

    def _wants_save(self) -> bool:
        """Returns whether this rank wants a save that is not due by the number of steps."""
        return False

    def _exit_if_stopped(self, stop: signal.Signals | None) -> None:
        if stop is None:
            return
        if self._trainer.is_global_zero:
            place = f"after step {self._trainer.global_step}; saved {display_path(self.path)}"
            print_stop(f"Stopped by {stop.name} {place}.", stop)
        STOP.received_signal = None
        raise SystemExit(128 + stop)

    def _save(self) -> None:
        self._saving = True
        try:
            with self._own_io():
                self._trainer.save_checkpoint(self.path, weights_only=False)
        finally:
            self._saving = False
        self._saved_step = self._trainer.global_step

    @contextmanager
    def _own_io(self) -> Iterator[None]:
        """Reads and writes verified files within the body, unless the Trainer has a CheckpointIO of the user."""
        strategy, before = self._trainer.strategy, self._trainer.strategy.checkpoint_io
        strategy.checkpoint_io = self._io or before
        try:
            yield
        finally:
            strategy.checkpoint_io = before

    def _lock(self, trainer: Trainer) -> None:
        """Locks the folder on rank 0.

        Raises:
            InputError: Another training uses it; all ranks raise it.
        """
        message = ""
        if trainer.is_global_zero:
            try:
                self._open.enter_context(locked(self.path.parent))
            except InputError as error:
                message = str(error)
        # Not empty, which cannot be sent.
        message = all_gather_bytes(f"{message}\n".encode())[0].decode().strip()
        require(not message, message)

    def _local_state(self) -> dict[str, Any]:
        return {
            "loaders": self._loaders.save(ended=self._ended),
            "module": self._module_state.save(),
            "trainer": self._state.save(),
        }

    def _restore(self, has_ended: bool) -> None:
        """Restores the state that was saved, or of a training that has ended only what a fit without a step leaves."""
        assert self._pending is not None
        if has_ended:
            self._state.load_end(self._pending["trainer"])
            return
        state, self._pending = self._pending, None
        self._module_state.load(state["module"])
        self._state.load(state["trainer"], has_ended=state["loaders"]["ended"])

    def _close(self) -> None:
        if hasattr(self, "_loading"):
            self._loading.close()
        self._open.close()


def check_saved(checkpoint: Mapping[str, Any], world_size: int) -> None:
    """Rejects a checkpoint that `world_size` ranks cannot resume bit-identically.

    Raises:
        InputError: It was not saved by ExactCheckpoint, or by another number of ranks.
    """
    require(
        _KEY in checkpoint,
        "The checkpoint was not saved by ExactCheckpoint, so that a bit-identical resume is impossible. Resume "
        "from `ExactCheckpoint.last`, or remove ExactCheckpoint.",
    )
    ranks = checkpoint[_KEY].get("ranks") if isinstance(checkpoint[_KEY], Mapping) else None
    require(isinstance(ranks, list), "The part of ExactCheckpoint in the checkpoint is damaged.")
    count = len(ranks or ())
    require(
        count == world_size,
        f"The checkpoint was saved by {count} rank{'s' * (count != 1)}, and cannot be resumed bit-identically by "
        f"{world_size}: use {count} device{'s' * (count != 1)}.",
    )
