"""The places where the project reaches into Lightning's private parts, each with a test that notices a change.

1. Lightning's handler of SIGTERM and its broadcast at each step: `leave_signals_alone` takes both away. Noticed by
   `test_lightning_leaves_signals_and_steps_alone` in tests/faults/test_signals.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def leave_signals_alone(trainer: Trainer) -> None:
    """Keeps Lightning's Trainer from handling signals, and from asking at each step whether one has come.

    Its handler of SIGTERM takes part in a collective, which waits for ever where the other ranks are not in it, and
    each step pays a broadcast to learn of a signal. The project's own `STOP` and `Consensus` do both.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
