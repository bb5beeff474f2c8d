"""All uses of private parts of Lightning, each with the test that detects a change in them.

1. `disable_signal_handling`: the SIGTERM handler and the broadcast in each step. Detected by
   `test_lightning_does_not_handle_signals` in tests/faults/test_signals.py.
2. `inspect_signature_once`: the arguments of `training_step`. Detected by
   `test_the_signature_of_a_training_step_is_inspected_once` in tests/test_template.py.
3. Those of a step are in `step/lightning_internals.py`, those of an evaluation in `evaluation/lightning_internals.py`,
   and those of saved logged values in `trainer_state`.

ExactCheckpoint, whose tests are in tests/plugins/test_exact_internals.py:

4. `handles_no_signals`: as 1. `test_the_signal_handling_of_a_trainer_is_disabled_for_a_while`.
5. `uses_dataloader_iter`: how Lightning reads the argument. `test_a_dataloader_iter_is_found`.
6. `tensor_version`: torch's count of in-place changes. `test_a_change_in_place_is_found`.
7. `wrap_setup_data`, `skip_restart_logic`: called once before and once in the first epoch, and between the reset of the
   loop and its first batch. `test_the_loops_call_the_wrapped_functions`; `end_restart`: `test_a_restart_is_ended`;
   `epochs_of_reload`, `in_epoch`, `set_validation_reload`: `test_loaders_are_reloaded_as_without_an_interruption` in
   tests/plugins/test_dataloaders.py.
8. `prefetched_batches`, `consumed_loaders`, `set_consumed_loaders`: `test_the_fetcher_and_the_combined_loader`
   and `test_the_ended_loaders_of_several_are_known_and_set`.
9. `wrapped_sampler`: `test_a_sampler_that_lightning_splits_has_its_state` in tests/plugins/test_dataloaders.py.
10. `names_of_the_framework`: the attributes that are not the user's. `test_the_attributes_of_the_framework_are_known`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer


def disable_signal_handling(trainer: Trainer) -> None:
    """Disables the signal handlers of a Trainer, and its check for signals in each step.

    Lightning's SIGTERM handler calls a collective, which hangs if the other ranks do not, and each step costs a
    broadcast. `STOP` and `Consensus` replace both.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def inspect_signature_once(trainer: Trainer) -> None:
    """Makes a Trainer inspect the signature of `training_step` once per module class instead of in each step."""
    loop = trainer.fit_loop.epoch_loop
    known: dict[Any, bool] = {}
    # Functions of this module can be sent to the processes that `ddp_spawn` starts.
    loop._build_kwargs = partial(_build_kwargs, trainer, loop._build_kwargs, known)  # type: ignore[method-assign]


def _build_kwargs(
    trainer: Trainer,
    inspect: Callable[..., Any],
    known: dict[Any, bool],
    kwargs: OrderedDict[str, Any],
    batch: Any,
    batch_idx: int,
) -> OrderedDict[str, Any]:
    module = type(trainer.lightning_module)
    if module not in known:
        known[module] = "batch_idx" in inspect(OrderedDict(), batch, batch_idx)
    kwargs["batch"] = batch
    if known[module]:
        kwargs["batch_idx"] = batch_idx
    return kwargs


@contextmanager
def handles_no_signals(trainer: Trainer) -> Iterator[None]:
    """Disables the signal handlers of a Trainer within the body; see `disable_signal_handling`."""
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    before = dict(vars(connector)), dict(vars(loop))
    disable_signal_handling(trainer)
    try:
        yield
    finally:
        for owner, attributes, name in (
            (connector, before[0], "register_signal_handlers"),
            (loop, before[1], "_broadcast_sigterm_tensor"),
        ):
            vars(owner).pop(name, None)
            if name in attributes:
                vars(owner)[name] = attributes[name]


def logged_steps(trainer: Trainer) -> int:
    """Returns how many batches have made an optimizer step, which is the step that a Trainer gives its loggers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def step_metrics(trainer: Trainer) -> dict[str, float]:
    """Returns what the last training step has logged for the loggers, on this rank."""
    results = trainer.fit_loop.epoch_loop._results
    return {name: float(value) for name, value in results.metrics(on_step=True)["log"].items()}


def uses_dataloader_iter(module: Any) -> bool:
    """Returns whether a training step takes the iterator instead of a batch."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return bool(is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True))


@cache
def names_of_the_framework() -> frozenset[str]:
    """Returns the names of a module's attributes that torch and Lightning set, without those that a user changes."""
    from lightning.pytorch import LightningModule

    of_the_user = {"training", "_automatic_optimization", "_param_requires_grad_state"}
    return frozenset(vars(LightningModule())) - of_the_user


def tensor_version(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place; 0 for a tensor that does not count."""
    return 0 if tensor.is_inference() else tensor._version


def wrap_setup_data(loop: Any, around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Lets a fit or a validation loop set up its dataloaders within a context; returns a function to undo it."""
    setup = loop.setup_data

    def wrapped() -> None:
        with around():
            setup()

    loop.setup_data = wrapped
    return lambda: vars(loop).pop("setup_data", None) and None


def validation_loop(trainer: Trainer) -> Any:
    """Returns the loop that validates within a fit."""
    return trainer.fit_loop.epoch_loop.val_loop


def epochs_of_reload(trainer: Trainer) -> dict[str, Any]:
    """Returns the epochs in which the dataloaders of a fit were last set up; None for those that were not."""
    epochs = {
        "train": trainer.fit_loop._last_train_dl_reload_epoch,
        "validation": validation_loop(trainer)._last_val_dl_reload_epoch,
    }
    return {name: int(epoch) if math.isfinite(epoch) else None for name, epoch in epochs.items()}


def is_reload_due(trainer: Trainer, epoch: int | None) -> bool:
    """Returns whether dataloaders that were set up in an epoch are set up again in the current one."""
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined] # Lightning sets it elsewhere
    return bool(every) and epoch is not None and trainer.current_epoch - epoch >= every


def set_validation_reload(trainer: Trainer, epoch: int | None) -> None:
    """Restores what `epochs_of_reload` has returned for the validation."""
    if epoch is not None:
        validation_loop(trainer)._last_val_dl_reload_epoch = epoch


@contextmanager
def in_epoch(trainer: Trainer, epoch: int | None) -> Iterator[None]:
    """Lets a Trainer that reloads its dataloaders set them up as in an earlier epoch, from which it counts."""
    progress = trainer.fit_loop.epoch_progress.current
    before = progress.completed
    if epoch is not None and trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        progress.completed = epoch
    try:
        yield
    finally:
        progress.completed = before


def end_restart(trainer: Trainer) -> None:
    """Lets the loops continue as if they had not been restored: the next epoch begins with its first batch."""
    from lightning.pytorch.loops.loop import _Loop

    # With `max_steps`, the setter of the fit loop itself always sets True.
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def skip_restart_logic(trainer: Trainer) -> None:
    """Lets the first batch of a resumed epoch be an ordinary one: nothing of the previous batch is left to be done."""
    loop = trainer.fit_loop.epoch_loop
    start = loop.on_run_start

    def wrapped(data_fetcher: Any) -> None:
        start(data_fetcher)
        end_restart(trainer)
        vars(loop).pop("on_run_start", None)

    loop.on_run_start = wrapped  # type: ignore[method-assign]


def wrapped_sampler(sampler: Any) -> Any:
    """Returns the sampler whose indices Lightning's own sampler splits over the ranks, or None for another sampler."""
    dataset: Any = getattr(sampler, "dataset", None)
    return dataset._sampler if type(dataset).__name__ == "_DatasetSamplerWrapper" else None


def prefetched_batches(trainer: Trainer) -> int:
    """Returns how many batches a fit loads ahead: one if the number of batches is unknown."""
    fetcher = trainer.fit_loop._data_fetcher
    return 1 if fetcher is not None and fetcher.length is None else 0


def consumed_loaders(trainer: Trainer) -> list[bool]:
    """Returns which of several dataloaders have ended once in this epoch."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(getattr(combined._iterator, "_consumed", []))


def set_consumed_loaders(trainer: Trainer, consumed: list[bool]) -> None:
    """Restores what `consumed_loaders` has returned."""
    combined = trainer.fit_loop._combined_loader
    if consumed and combined is not None:
        combined._iterator._consumed[:] = consumed  # type: ignore[union-attr]
