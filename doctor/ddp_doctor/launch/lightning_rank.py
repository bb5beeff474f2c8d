"""Trains a LightningModule as its user's script would: with a stock Trainer, from its last checkpoint if it has one."""

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

# Its checkpoint, in the current folder.
_CHECKPOINT = Path("ddp-doctor-checkpoints", "last.ckpt")


def run_module(kind: Any, data: Any, world_size: int) -> None:
    """Trains a LightningModule with its data; both are classes, and `data` may be None."""
    # It extends that of `pytorch_lightning` or that of `lightning.pytorch`.
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    pl = importlib.import_module("pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch")
    module, data = kind(), data() if data else None
    unused = not module.automatic_optimization
    ddp = pl.strategies.DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
    # After each epoch, over the one before.
    save = pl.callbacks.ModelCheckpoint(
        _CHECKPOINT.parent, _CHECKPOINT.stem, save_top_k=-1, every_n_epochs=1, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ddp if world_size > 1 else "auto",
        max_epochs=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[save],
    )
    trainer.fit(module, datamodule=data, ckpt_path=_CHECKPOINT if _CHECKPOINT.exists() else None)
    is_overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
    if any(is_overridden("predict_dataloader", owner) for owner in (module, data) if owner is not None):
        # LD030 says why a prediction fails, which does not undo what was trained.
        with suppress(Exception):
            trainer.predict(module, datamodule=data)
