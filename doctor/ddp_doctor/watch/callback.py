"""The watch as a callback of Lightning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_doctor.watch.rank import EVERY, Watch, watch

# A Trainer accepts the callbacks of its own package only.
if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback


class WatchCallback(Callback):
    """Watches a `fit` for differences between its ranks.

    The findings are in `watch.json`, and each is printed when it is first seen:

        trainer = Trainer(max_steps=4, callbacks=[WatchCallback("watch")])
        trainer.fit(module, train_loader)

    Args:
        folder: A folder that all ranks see; rank 0 writes `watch.json` there.
        every: Optimizer steps between two records, at least.
    """

    def __init__(self, folder: str | Path = "watch", every: int = EVERY) -> None:
        self.folder, self.every = Path(folder), every
        self._watch: Watch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to watch."""
        self._watch = watch(self.folder, pl_module, self.every)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
