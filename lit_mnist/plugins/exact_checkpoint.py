"""A checkpoint callback whose runs resume bit-identically, at any step, with any module, under any Trainer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision

from lit_mnist.distributed.consensus import Consensus
from lit_mnist.distributed.gather import all_gather_bytes, end_collectives_at_exit
from lit_mnist.distributed.rank import Rank, warn_once
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import display_path, print_stop
from lit_mnist.errors import require
from lit_mnist.plugins import lightning_internals
from lit_mnist.plugins.exact_checks import (
    check_draws_nothing,
    check_ranks,
    check_training,
    default_checkpoint_io,
    digest_of_rank_0,
)
from lit_mnist.plugins.exact_entry import KEY, entry_of_ranks, entry_of_step, read_entry
from lit_mnist.plugins.folder_lock import lock_on_rank_0
from lit_mnist.plugins.generators import process_generators
from lit_mnist.plugins.module_state import ModuleState
from lit_mnist.plugins.plain_values import pack
from lit_mnist.plugins.step_loader import state_is_step
from lit_mnist.plugins.train_loaders import TrainLoaders
from lit_mnist.plugins.trainer_state.lightning_internals import TrainerState
from lit_mnist.plugins.trainer_state.sums import load_metrics, save_metrics


class ExactCheckpoint(Checkpoint):
    """Saves `last.ckpt` so that a resumed run is bit-identical to an uninterrupted one, for any module.

    It saves between two batches, and at the end. At SIGTERM, SIGINT, SIGUSR1 or SIGHUP on any rank, all ranks save
    together and exit with the code 128 + signal. Resume with the same number of ranks, or on any number if the state of
    the module is a function of the step (`state_is_step`, see docs/plugins.md); `last` is None at the start:

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
        self._open, self._loading = ExitStack(), ExitStack()
        self._best_of_ranks = ""  # Set by Lightning in a process that has started ranks, which calls no `setup`.

    @property
    def last(self) -> Path | None:
        """The checkpoint to resume from, for `ckpt_path`; None if there is none yet."""
        return self.path if self.path.exists() else None

    @property
    def best_model_path(self) -> str:
        """The best checkpoint of a `ModelCheckpoint` beside this callback, for `ckpt_path="best"`."""
        callbacks = self._trainer.callbacks if "_trainer" in vars(self) else []  # type: ignore[attr-defined]
        others = (each.best_model_path for each in callbacks if isinstance(each, ModelCheckpoint))
        return next(others, self._best_of_ranks)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_of_ranks = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepares a fit, and rejects what cannot be restored."""
        self._trainer = trainer
        if stage != "fit":
            return
        check_training(trainer, pl_module)
        if isinstance(trainer.precision_plugin, DoublePrecision):
            # The Trainer converts the module after it has loaded the checkpoint, whose weights it would round.
            pl_module.double()
        self._close()
        lock_on_rank_0(self._open, self.path.parent, is_first=trainer.is_global_zero)
        self._io = default_checkpoint_io(trainer)
        self._pending: dict[str, Any] | None = None
        self._before_step: bytes | None = None
        self._saving, self._ended, self._saved_step, self._batches = False, False, 0, 0
        self._declared = state_is_step(pl_module)
        self._loaders = TrainLoaders(trainer, self._between_batches, self._restore, state_is_step=self._declared)
        self._loaders.attach(self._open)
        self._open.enter_context(lightning_internals.handles_no_signals(trainer))
        # Until the checkpoint is loaded.
        self._loading = ExitStack()
        self._loading.enter_context(self._verified_io())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Reads this rank's part.

        Raises:
            InputError: The checkpoint was not saved by this callback, or by another number of ranks.
        """
        if trainer.state.fn != "fit":
            return
        self._pending = read_entry(checkpoint, trainer, state_is_step=self._declared)
        self._loaders.resume_from(self._pending["loaders"])
        self._saved_step = checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to record signals instead of exiting at once."""
        self._loading.close()
        self._loaders.fit_started = True
        self._state, self._module_state = TrainerState(trainer), ModuleState(pl_module)
        if self._pending is None and trainer.is_global_zero and self.path.exists():
            warn_once(
                f"{self.path} exists, and this training run does not resume from it: it will be replaced. To resume, "
                "pass its path as ckpt_path, such as ckpt_path=checkpoint.last."
            )
        if self._pending is not None and self._pending["between_batches"]:
            lightning_internals.skip_restart_logic(trainer)
        rank = Rank(trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices)
        end_collectives_at_exit()
        self._consensus = Consensus(rank, trainer.strategy.root_device)
        self._open.enter_context(STOP.listening())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keeps the generators before the first step of a training run whose state is a function of the step."""
        if self._loaders.by_step and self._before_step is None:
            self._before_step = pack(process_generators())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Warns if that step has drawn random numbers that a resumed training run would not draw."""
        if self._before_step:
            check_draws_nothing(pl_module, self._before_step)
            self._before_step = b""

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
        shared, own = self._state_of_step() if self._loaders.by_step else ({}, self._state_of_rank())
        parts = all_gather_bytes(digest + pack(own))
        check_ranks([part[: len(digest)] for part in parts], trainer)
        parts = [part[len(digest) :] for part in parts]
        checkpoint[KEY] = entry_of_step(shared, parts) if self._loaders.by_step else entry_of_ranks(parts)

    def _between_batches(self) -> None:
        """Saves if a save is due, and exits if any rank has received a signal."""
        trainer = self._trainer
        used = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        window = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        if used % window:
            return
        self._batches += 1
        decision = self._consensus.on_step_end(self._batches, STOP.received_signal, save=self._wants_save())
        if decision.stop or decision.save or self._is_due(trainer.global_step):
            self._save()
        self._exit_if_stopped(decision.stop)

    def _is_due(self, step: int) -> bool:
        """Returns whether a save is due by the number of steps, which all ranks know."""
        return step - self._saved_step >= self.every_n_train_steps

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
            with self._verified_io():
                self._trainer.save_checkpoint(self.path, weights_only=False)
        finally:
            self._saving = False
        self._saved_step = self._trainer.global_step

    @contextmanager
    def _verified_io(self) -> Iterator[None]:
        """Reads and writes verified files within the body, unless the Trainer has a CheckpointIO of the user."""
        strategy, before = self._trainer.strategy, self._trainer.strategy.checkpoint_io
        strategy.checkpoint_io = self._io or before
        try:
            yield
        finally:
            strategy.checkpoint_io = before

    def _state_of_step(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the state that all ranks share, and the sums over the epoch of this rank."""
        trainer = self._state.save()
        sums = {"results": trainer.pop("results"), "metrics": save_metrics(self._trainer.lightning_module)}
        return {"loaders": self._loaders.save(ended=self._ended), "trainer": trainer}, sums

    def _state_of_rank(self) -> dict[str, Any]:
        return {
            "loaders": self._loaders.save(ended=self._ended),
            "module": self._module_state.save(),
            "trainer": self._state.save(),
        }

    def _restore(self, has_ended: bool) -> None:
        """Restores the saved state, or of a training run that has ended only what a fit without a step leaves."""
        assert self._pending is not None
        if has_ended:
            self._state.load_end(self._pending["trainer"])
            return
        state, self._pending = self._pending, None
        if "module" in state:
            self._module_state.load(state["module"])
        if "metrics" in state:
            load_metrics(self._trainer.lightning_module, state["metrics"])
        if "trainer" in state:
            self._state.load(state["trainer"], has_ended=state["loaders"]["ended"])

    def _close(self) -> None:
        self._loading.close()
        self._open.close()
