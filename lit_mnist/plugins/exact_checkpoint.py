"""A resume that ends with the weights of an uninterrupted run, for any module and data, under any Trainer."""

import io
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lit_mnist.errors import InputError

_KEY = "exact_checkpoint"
_LINE = (
    "in train_dataloader(), replace torch's DataLoader by that of `from lit_mnist.plugins import ResumableDataLoader`, "
    "with the same arguments"
)


def generator_states() -> dict[str, Any]:
    """Returns the states of the global generators of this process: torch, NumPy, Python, and the current GPU's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Restores what `generator_states` has returned."""
    kind, keys, *rest = states["numpy"]
    torch.set_rng_state(states["torch"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader that can begin within an epoch as if it had read the batches before.

    A run that is resumed in mid-epoch with torch's DataLoader begins a new order: some samples of the epoch are used
    twice and others never, and the data set draws other random numbers. This class takes the same arguments:

        checkpoint = ExactCheckpoint("checkpoints")
        trainer = Trainer(callbacks=[checkpoint])
        loader = ResumableDataLoader(dataset, 64, shuffle=True, num_workers=2)
        trainer.fit(module, loader, ckpt_path=checkpoint.last)

    It restores the generators with which the epoch began, and reads the earlier batches again without using them, so
    that the workers draw the same random numbers. A batch sampler that can seek, such as `ExactDistributedSampler`, in
    a DataLoader of torch takes no such time. Without `ExactCheckpoint`, restore the global generators yourself.

    Raises:
        InputError: The workers are persistent: their generators run on over epochs, and nothing can restore them.
    """

    _epoch: dict[str, Any] | None = None
    _start: dict[str, Any] | None = None
    _read = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yields the batches of an epoch, or the rest of one."""
        # A generator: nothing is drawn before the first batch is asked for, when a Trainer has restored everything.
        if self.persistent_workers:
            raise InputError("ResumableDataLoader cannot restore persistent workers. Remove persistent_workers=True.")
        start, self._start = self._start, None
        now = generator_states()
        if start:
            set_generator_states(start["generators"])
            _set_own_generators(self, start["own"])
        self._epoch = {"generators": generator_states(), "own": _own_generators(self)}
        self._read = start["read"] if start else 0
        batches = super().__iter__()
        if start:
            for _ in range(self._read):
                next(batches)
            set_generator_states(now)
        for batch in batches:
            self._read += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of batches that were read, and the generators with which the epoch began."""
        return {"read": self._read, **(self._epoch or {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration begin after the batches that were read."""
        self._start = state if state["read"] else None


class ExactCheckpoint(ModelCheckpoint):
    """Saves `last.ckpt`, from which a run continues as if nothing had happened, with bit-identical weights.

    A Trainer saves no generators: a resumed run draws other dropout masks and another order of the samples. In
    mid-epoch it begins the data anew, and with `max_steps` it counts an epoch too many. This callback adds what is
    missing to every checkpoint of its Trainer, including those of other ModelCheckpoints:

        checkpoint = ExactCheckpoint("checkpoints", every_n_train_steps=100)
        trainer = Trainer(callbacks=[checkpoint])
        trainer.fit(module, ResumableDataLoader(dataset, 64, shuffle=True), ckpt_path=checkpoint.last)

    Any DataLoader continues at the end of an epoch. In mid-epoch, a `ResumableDataLoader` does, a loader with a state
    of its own (torchdata's StatefulDataLoader), and one whose batch sampler can seek (`ExactDistributedSampler`, if the
    data set draws no random numbers in workers). If all samplers can seek, the number of ranks may change.

    Not restored: attributes that are in no state (they are named in a warning); what `self.log` averages over an epoch,
    which counts the batches since the resume; what a module does in its own `on_train_batch_end`, which is called after
    the checkpoint is saved (use a Callback); the step of a `ReduceLROnPlateau` with `interval="step"`.

    Args:
        dirpath: Folder of the checkpoint; by default `checkpoints` in the log folder.
        every_n_train_steps: Optimizer steps between two checkpoints. Others are saved at the end of each epoch and
            at `max_steps`. If a validation follows a step, it comes first.

    Raises:
        InputError: A checkpoint cannot be resumed exactly. It is raised before the first step.
    """

    def __init__(self, dirpath: str | Path | None = None, every_n_train_steps: int = 100) -> None:
        # With these options, the base class itself saves nothing.
        super().__init__(dirpath, save_top_k=0, every_n_train_steps=every_n_train_steps)
        self.every_n_steps = every_n_train_steps
        self._resume: dict[str, Any] | None = None
        self._is_due = self._loaders_came_early = self._has_warned = False
        self._step_before = self._saved_step = -1
        self._weights: dict[str, Any] = {}
        self._attributes: dict[str, str] = {}

    @property
    def last(self) -> str | None:
        """The path of `last.ckpt` if it exists, otherwise None."""
        path = Path(self.dirpath or "", "last.ckpt")
        return str(path) if self.dirpath and path.exists() else None

    def save_now(self, trainer: Trainer) -> bool:
        """Saves `last.ckpt`; all ranks call this in `on_train_batch_end`.

        Returns:
            Whether it was saved. Within accumulated gradients, before a validation and after the last batch of an epoch
            it is not, since a Trainer cannot resume there. It is saved as soon as these are over.
        """
        self._is_due = not self._is_exact(trainer)
        if not self._is_due:
            self._save(trainer)
        return not self._is_due

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Moves to the end of the callbacks, so that the checkpoint has the states of the others after their hooks."""
        super().setup(trainer, pl_module, stage)
        trainer.callbacks = [each for each in trainer.callbacks if each is not self] + [self]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes whether the loaders were set up before Lightning restores their states."""
        # github.com/Lightning-AI/pytorch-lightning/issues/20550
        self._loaders_came_early = trainer.train_dataloader is not None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the states, after everything else was restored."""
        super().on_train_start(trainer, pl_module)
        self._is_due, self._saved_step = False, -1
        self._attributes = _plain_attributes(trainer)
        if trainer.ckpt_path:
            self._restore(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes the step, which shows at the end of the batch whether the optimizer made one."""
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every n steps and at `max_steps`."""
        step, every = trainer.global_step, self.every_n_steps
        # Manual optimization may make several steps in a batch, and pass over a multiple of n.
        self._is_due |= step // every > self._step_before // every or step == trainer.max_steps
        if self._is_due and step != self._saved_step:
            self.save_now(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what was due before the validation."""
        if self._is_due and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves at the end of an epoch."""
        if trainer.global_step != self._saved_step:
            self._save(trainer)
        # A Trainer would leave out the step of ReduceLROnPlateau that follows a resumed epoch.
        trainer.fit_loop.on_iteration_done()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the states to a checkpoint of this Trainer."""
        if _KEY in checkpoint:  # by another ExactCheckpoint
            return
        progress, used = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.batch_idx + 1
        is_epoch_end = progress.processed == progress.ready  # type: ignore[attr-defined]
        loaders = _train_loaders(trainer)
        rank = {
            "generators": generator_states(),
            "own": [_own_generators(loader) for loader in loaders],
            "positions": None if is_epoch_end else [_position(loader, used) for loader in loaders],
        }
        checkpoint[_KEY] = {
            "is_exact": is_epoch_end or self._is_exact(trainer),
            "batches": None if is_epoch_end else used,
            "metrics": _metrics_of_plateaus(trainer) if is_epoch_end else {},
            "ranks": _gather(rank, trainer.world_size),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the states until everything else is restored."""
        self._resume = checkpoint.get(_KEY)
        # Lightning does not know that this callback restores the position of a loader, or rejects the checkpoint.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        # Lightning restores the weights before it makes the module float64.
        self._weights = checkpoint["state_dict"] if trainer.precision == "64-true" else {}

    def _is_exact(self, trainer: Trainer) -> bool:
        """Returns whether a Trainer that resumes here neither skips nor repeats anything."""
        has_stepped = trainer.global_step != self._step_before
        return trainer.validating or (has_stepped and not trainer.is_last_batch and not _validates_next(trainer))

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._is_due, self._saved_step = False, trainer.global_step
        path = str(Path(self.dirpath or "", "last.ckpt"))
        self.last_model_path = self.best_model_path = path
        trainer.save_checkpoint(path, weights_only=False)
        now = _plain_attributes(trainer)
        changed = [name for name, value in self._attributes.items() if now.get(name) != value]
        if changed and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{', '.join(changed)} changed in the training, but no checkpoint contains it: a resumed run begins "
                "with its first value. Add it in on_save_checkpoint (of a data module: in state_dict)."
            )

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state, path = self._resume, trainer.ckpt_path
        if self._weights:
            pl_module.load_state_dict(self._weights, strict=pl_module.strict_loading)
        if state is None:
            raise InputError(
                f"{path} was saved without ExactCheckpoint and has no states of generators, so it cannot be resumed "
                "exactly. Begin from its weights with load_from_checkpoint, or remove ExactCheckpoint."
            )
        if not state["is_exact"]:
            raise InputError(
                f"{path} was saved within accumulated gradients, or before a validation or the end of its epoch, which "
                "a Trainer leaves out in a resume. Resume from last.ckpt."
            )
        loaders, ranks = _train_loaders(trainer), state["ranks"]
        if len(ranks) != trainer.world_size:
            if not all(_can_seek(loader) for loader in loaders):
                raise InputError(
                    f"{path} was saved by {len(ranks)} ranks, and {trainer.world_size} would have other batches. "
                    f"Resume on {len(ranks)} ranks. For the next run, use "
                    "DataLoader(dataset, batch_sampler=ExactDistributedSampler(dataset, batch_size))."
                )
            rank_zero_info(f"{path} is of {len(ranks)} ranks: a rank that has no generators takes those of rank 0.")
        rank = ranks[trainer.global_rank if trainer.global_rank < len(ranks) else 0]
        if state["batches"] is None:
            _begin_epoch(trainer)
        in_epoch = state["batches"] is not None and state["batches"] < trainer.num_training_batches
        for index, loader in enumerate(loaders):
            if in_epoch:
                self._seek(trainer, loader, rank["positions"][index])
            elif isinstance(loader, ResumableDataLoader):
                loader.load_state_dict({"read": 0})
            _set_own_generators(loader, rank["own"][index])
        for index, metric in state["metrics"].items():
            pl_module.lr_scheduler_step(trainer.lr_scheduler_configs[index].scheduler, metric)
        set_generator_states(rank["generators"])

    def _seek(self, trainer: Trainer, loader: Any, position: dict[str, Any] | None) -> None:
        """Lets a loader continue in mid-epoch."""
        if position is None or math.isinf(trainer.num_training_batches):
            raise InputError(
                f"{trainer.ckpt_path} was saved within an epoch, where {type(loader).__name__} cannot continue. Resume "
                f"from the checkpoint of an epoch's end. For the next run, {_LINE}. (An IterableDataset needs a loader "
                "with a state of its own, such as torchdata's StatefulDataLoader, and a length.)"
            )
        if isinstance(loader, ResumableDataLoader):
            loader.load_state_dict(position)
        elif hasattr(loader, "load_state_dict"):
            # Lightning restores it before its first iteration, or never.
            if self._loaders_came_early:
                raise InputError(
                    f"{type(loader).__name__} cannot continue in mid-epoch if configure_optimizers uses "
                    "trainer.estimated_stepping_batches. Compute the number of steps from the data set."
                )
        elif loader.num_workers == 0:
            loader.batch_sampler.load_state_dict(position)
        # Workers have begun to read already: from the right place if the data module restores it itself.
        elif not _has_own_state(trainer.datamodule):  # type: ignore[attr-defined]
            raise InputError(f"{trainer.ckpt_path} was saved within an epoch, but workers begin too early: {_LINE}.")


def _train_loaders(trainer: Trainer) -> list[Any]:
    return CombinedLoader(trainer.train_dataloader).flattened


def _can_seek(loader: Any) -> bool:
    sampler = getattr(loader, "batch_sampler", None)
    return hasattr(sampler, "load_state_dict") and hasattr(sampler, "start")


def _position(loader: Any, used: int) -> dict[str, Any] | None:
    """Returns where a loader is after the batches that were used, or None if it cannot continue there."""
    if isinstance(loader, ResumableDataLoader):
        return None if isinstance(loader.dataset, IterableDataset) else loader.state_dict()
    if hasattr(loader, "load_state_dict"):
        return {}
    if _can_seek(loader):
        return {**loader.batch_sampler.state_dict(), "start": used % len(loader.batch_sampler)}
    return None


def _generators_of(loader: Any) -> list[torch.Generator]:
    found = (getattr(owner, "generator", None) for owner in (loader, getattr(loader, "sampler", None)))
    return [each for each in found if isinstance(each, torch.Generator)]


def _own_generators(loader: Any) -> list[torch.Tensor]:
    return [each.get_state() for each in _generators_of(loader)]


def _set_own_generators(loader: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators_of(loader), states, strict=True):
        generator.set_state(state)


def _gather(state: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """Returns the states of all ranks."""
    if world_size == 1:
        return [state]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content: list[Any] = [None] * world_size
    dist.all_gather_object(content, buffer.getvalue())  # bytes, since it fails for tensors with torch 2.15
    return [torch.load(io.BytesIO(each), weights_only=True) for each in content]


def _begin_epoch(trainer: Trainer) -> None:
    """Lets a Trainer that was restored at the end of an epoch begin the next one as it does without a resume.

    Otherwise it uses the iterators that it made before the generators were restored, and with `max_steps` it repeats
    the end of the epoch.
    """
    progress = trainer.fit_loop.epoch_progress
    if progress.current.completed < progress.current.processed:  # type: ignore[attr-defined]
        progress.increment_completed()
    trainer.fit_loop.epoch_loop.restarting = False
    trainer.fit_loop.on_iteration_done()


def _validates_next(trainer: Trainer) -> bool:
    """Returns whether a validation follows this batch, which is not the last of its epoch."""
    every = trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every and (trainer.current_epoch + 1) % every):
        return False
    batches = trainer.fit_loop.batch_idx if every else trainer.fit_loop.total_batch_idx
    return (batches + 1) % (trainer.val_check_batch or math.inf) == 0


def _metrics_of_plateaus(trainer: Trainer) -> dict[int, Any]:
    """Returns the metric of each `ReduceLROnPlateau` that a Trainer steps after the checkpoint of an epoch's end."""
    return {
        index: trainer.callback_metrics[config.monitor]
        for index, config in enumerate(trainer.lr_scheduler_configs)
        if trainer.lightning_module.automatic_optimization
        and config.reduce_on_plateau
        and config.interval == "epoch"
        and (trainer.current_epoch + 1) % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    }


def _has_own_state(datamodule: Any) -> bool:
    return datamodule is not None and type(datamodule).state_dict is not LightningDataModule.state_dict


def _plain_attributes(trainer: Trainer) -> dict[str, str]:
    """Returns the small plain attributes, printed, of the module and the data module that save none themselves."""
    module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    owners = []
    if type(module).on_save_checkpoint is LightningModule.on_save_checkpoint:
        owners.append(module)
    if datamodule is not None and not _has_own_state(datamodule):
        owners.append(datamodule)
    return {
        f"{type(owner).__name__}.{name}": repr(value)
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("_") and name != "training" and _is_small_and_plain(value)
    }


def _is_small_and_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() <= 1000
    return isinstance(value, int | float) or (isinstance(value, str | list | tuple | dict) and len(value) <= 1000)
