"""All uses of private parts of libraries, each with its reason and the test that fails when the library changes."""

from __future__ import annotations

from lightning.pytorch import Trainer


def skip_sigterm_broadcast(trainer: Trainer) -> None:
    """Lets a Trainer not broadcast in each step whether rank 0 has received SIGTERM; `StopTogether` agrees instead.

    No public option disables it. Without this, each step on two ranks of a CPU has one more collective. Tested by
    `test_no_broadcast_in_a_step` in tests/test_trainer.py.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
