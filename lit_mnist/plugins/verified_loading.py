"""Loading of a module from a checkpoint, verified and without executing pickled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from lightning.pytorch.utilities import rank_zero_warn

from lit_mnist.errors import InputError


class VerifiedLoading:
    """Mixed into a LightningModule, verifies what `load_from_checkpoint` loads, including from a run folder.

    It stands before the module in the list of bases. `checkpoint` is a file or the folder of a run:

        class VerifiedModule(VerifiedLoading, Module):
            pass

        loaded = VerifiedModule.load_from_checkpoint(checkpoint)
    """

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Loads a checkpoint, or the best one of a run folder, verified and without executing pickled code.

        Args:
            checkpoint_path: A run folder or a checkpoint file.
            *args: As of Lightning's method.
            **kwargs: As of Lightning's method.

        Raises:
            InputError: The file is missing, damaged, or no checkpoint.
        """
        # Defining a module needs nothing of the checkpoints.
        from lit_mnist.checkpoint.format import find_verified_checkpoint

        if kwargs.get("weights_only") is False:
            raise InputError("A checkpoint never executes code: weights_only=False is not available.")
        path = find_verified_checkpoint(Path(checkpoint_path), rank_zero_warn)
        loaded: Self = super().load_from_checkpoint(path, *args, **{**kwargs, "weights_only": True})  # type: ignore[misc]
        return loaded
