"""The train dataloaders of a fit: their position between two batches, and the way back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lit_mnist.distributed.rank import warn_once
from lit_mnist.errors import InputError, require
from lit_mnist.plugins import lightning_internals
from lit_mnist.plugins.exact_checks import check_loader
from lit_mnist.plugins.generators import (
    find_generators,
    process_generators,
    restore_object_generators,
    restore_process_generators,
    states_of,
)
from lit_mnist.plugins.loader_proxy import LoaderProxy
from lit_mnist.plugins.replay import ReplayLoader
from lit_mnist.plugins.step_loader import SteppedLoader, missing_for_step


class TrainLoaders:
    """Replaces the train dataloaders of a Trainer by ones whose position can be restored.

    Args:
        trainer: The Trainer, before it sets up its dataloaders.
        between_batches: Called before each batch is loaded, when everything of the previous batch is done.
        restore: Called with True before a training run that has ended resumes, and with False when the position of the
            save is reached.
        state_is_step: Whether the module declares that its state is a function of the step.

    Attributes:
        by_step: Whether that also holds for the dataloader, so that the position is that of the Trainer's loops.
        fit_started: Whether the optimizers exist. `configure_optimizers` may set up the dataloaders before, for
            `trainer.estimated_stepping_batches`; the Trainer then sets them up a second time.
    """

    def __init__(
        self,
        trainer: Trainer,
        between_batches: Callable[[], None],
        restore: Callable[[bool], None],
        *,
        state_is_step: bool,
    ) -> None:
        self._trainer, self._between_batches, self._restore = trainer, between_batches, restore
        self._declared, self.by_step, self.fit_started = state_is_step, False, False
        self._loaders: list[Any] = []
        self._pending: dict[str, Any] | None = None
        self._stage, self._resumed_end = "", False
        # What `train_dataloader` draws is drawn again by a resumed training run.
        self._request = self._before_setup = process_generators()
        self._before_in_flight: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        self._found: tuple[Any, int, list[tuple[str, Any]]] | None = None

    def attach(self, stack: ExitStack) -> None:
        """Begins to replace the dataloaders, until the stack is closed."""
        trainer, strategy = self._trainer, self._trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            dataloader = process(dataloader)
            return self._replace(dataloader) if trainer.training else dataloader

        vars(strategy)["process_dataloader"] = process_dataloader
        stack.callback(lambda: vars(strategy).pop("process_dataloader", None))
        validation = lightning_internals.validation_loop(trainer)
        stack.callback(lightning_internals.wrap_setup_data(trainer.fit_loop, self._set_up))
        stack.callback(lightning_internals.wrap_setup_data(validation, self._set_up_validation))

    def save(self, *, ended: bool) -> dict[str, Any]:
        """Returns the position as nested plain values and tensors.

        Args:
            ended: Whether the training has ended.
        """
        if self.by_step:
            return {"ended": ended}
        in_flight = 0 if ended else lightning_internals.prefetched_batches(self._trainer)
        return {
            "ended": ended,
            "request": self._request,
            "loaders": [loader.end() if ended else loader.position(in_flight) for loader in self._loaders],
            "consumed": lightning_internals.consumed_loaders(self._trainer),
            "before_in_flight": self._before_in_flight if in_flight else None,
            "process": process_generators(),
            "reloaded": lightning_internals.epochs_of_reload(self._trainer),
            "validation": states_of(self._generators_of_validation()),
        }

    def _generators_of_validation(self) -> list[tuple[str, Any]]:
        """Returns the generators of the validation dataloaders; looking for them may take longer than a save."""
        loaders, epoch = self._trainer.val_dataloaders, self._trainer.current_epoch
        if self._found is None or self._found[0] is not loaders or self._found[1] != epoch:
            self._found = loaders, epoch, list(find_generators(loaders))
        return self._found[2]

    def resume_from(self, state: dict[str, Any]) -> None:
        """Sets the position to go to."""
        self._pending = state

    def _replace(self, loader: Any) -> LoaderProxy:
        check_loader(loader)
        if self._loaders and self._loaders[0].begun:
            # The Trainer reloads its dataloaders.
            self._loaders = []
        if not self._loaders:
            self._request, self.by_step = self._before_setup, self._is_by_step(loader)
        elif self.by_step:
            raise InputError(
                "A module with state_is_step = True needs one train dataloader, but there are several: combine them in "
                "one that has a method seek(batch), or remove state_is_step."
            )
        if self.by_step:
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            self._loaders.append(SteppedLoader(loader, self._before_fetch, lambda: progress.current.ready))
            return self._loaders[0]
        self._loaders.append(ReplayLoader(loader, self._before_fetch))
        if self._pending is not None:
            saved = self._pending["loaders"][len(self._loaders) - 1]
            if not self._pending["ended"]:
                self._loaders[-1].resume_from(saved)
            else:
                # A loader that is made again has new generators.
                again = getattr(self._trainer, "reload_dataloaders_every_n_epochs", 0)
                self._loaders[-1].begin_late({} if again else saved)
        return self._loaders[-1]

    def _is_by_step(self, loader: Any) -> bool:
        """Returns whether nothing is stored of a rank.

        Raises:
            InputError: The checkpoint has nothing of a rank, but the dataloader needs it.
        """
        if not self._declared:
            return False
        missing, saved = missing_for_step(loader), self._pending
        if saved is not None and "request" in saved:
            return False
        require(
            saved is None or not missing,
            f"The checkpoint has no state of a rank, since the module has state_is_step = True, but {missing}.",
        )
        if missing:
            warn_once(
                f"state_is_step = True has no effect, because {missing}: ExactCheckpoint saves the state of each rank, "
                "and the training resumes on the same number of ranks only."
            )
        return not missing

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        self._before_loaders()
        pending = self._pending
        resumes = pending is not None and not (pending["ended"] and self._loaders)
        epoch = pending["reloaded"]["train"] if pending is not None and resumes and "reloaded" in pending else None
        with lightning_internals.in_epoch(self._trainer, epoch):
            yield
        self._after_loaders()

    @contextmanager
    def _set_up_validation(self) -> Iterator[None]:
        yield
        if self._pending is None:
            self._restore_validation(is_new=True)

    def _before_loaders(self) -> None:
        if self._pending is None:
            self._before_setup = process_generators()
        elif not self._loaders and "request" in self._pending:
            self._before_setup = self._pending["request"]
            restore_process_generators(self._before_setup)
        elif self._resumed_end and self._loaders and self._pending["ended"]:
            # More epochs follow: this is the start of the next one.
            self._finish_resume(self._pending)

    def _after_loaders(self) -> None:
        if self.fit_started and self._pending is not None and self._pending["ended"]:
            self._resumed_end = True
            self._restore(True)
            lightning_internals.end_restart(self._trainer)
            if any(loader.delivered for loader in self._loaders):
                # A batch was loaded ahead.
                self._pending["process"] = process_generators()

    def _before_fetch(self, loader: LoaderProxy) -> None:
        """Saves, exits or restores before the first of the train dataloaders loads its next batch."""
        if loader is not self._loaders[0]:
            return
        in_flight = lightning_internals.prefetched_batches(self._trainer)
        if self._pending is None:
            if loader.delivered or not in_flight:
                self._between_batches()
        elif self._pending["ended"]:
            # Loads the first batch of a further epoch ahead.
            restore_process_generators(self._pending["process"])
        else:
            self._resume(self._pending)
        if in_flight:
            self._before_in_flight = process_generators()

    def _resume(self, state: dict[str, Any]) -> None:
        """Goes to the position in the epoch, and restores the rest."""
        if self.by_step:
            self._finish_resume(state)
            return
        if self._stage != "in flight":
            for loader in self._loaders:
                loader.replay()
            if state["before_in_flight"]:
                # The Trainer loads a batch ahead, and comes here again for the next one.
                restore_process_generators(state["before_in_flight"])
                self._stage = "in flight"
                return
        else:
            for loader, position in zip(self._loaders, state["loaders"], strict=True):
                loader.end_flight(position)
        lightning_internals.set_consumed_loaders(self._trainer, state["consumed"])
        self._finish_resume(state)

    def _finish_resume(self, state: dict[str, Any]) -> None:
        self._pending, self._stage = None, ""
        self._restore(False)
        if not self.by_step:
            self._validation = state if "reloaded" in state else None
            self._restore_validation(is_new=False)
            restore_process_generators(state["process"])

    def _restore_validation(self, *, is_new: bool) -> None:
        """Restores the generators of the validation dataloaders, unless these are set up later or are due for a reload.

        Args:
            is_new: Whether they have just been set up for a validation.
        """
        loaders, state = self._trainer.val_dataloaders, self._validation
        if state is None or loaders is None:
            return
        self._validation, epoch = None, state["reloaded"]["validation"]
        is_due = lightning_internals.is_reload_due(self._trainer, epoch)
        if not is_due:
            restore_object_generators(state["validation"], loaders)
        if not (is_due and is_new):
            lightning_internals.set_validation_reload(self._trainer, epoch)
