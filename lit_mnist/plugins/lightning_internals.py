"""All uses of private names of libraries, each with its reason and the test that fails when the library changes.

Public but undocumented are the counters of the training loop (exact_checkpoint.py, whose tests kill and resume), the
kernels of batch norm (sync_batch_norm.py, whose tests compare with torch's), and the change of a copied loader's batch
sampler (evaluation.py, whose tests count each sample).
"""

from lightning.pytorch import Trainer


def skip_sigterm_broadcast(trainer: Trainer) -> None:
    """Lets a Trainer not broadcast in each step whether rank 0 has received SIGTERM; `StopTogether` agrees instead.

    No public option disables it. Without this, each step on two ranks of a CPU has one more collective. Tested by
    `test_no_broadcast_in_a_step` in tests/test_trainer.py.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def logged_values_without_metric(trainer: Trainer) -> dict[str, float | None]:
    """Returns the values that this evaluation has logged as numbers and that Lightning averages over the ranks.

    A value that was logged once, at the end of an epoch, is returned as this rank has logged it; one that was logged in
    steps is None. No public interface tells whether a logged value is a Metric. Tested by
    `test_what_is_not_exact_is_said` in tests/test_evaluation.py.
    """
    values: dict[str, float | None] = {}
    for result in (trainer._results or {}).values():
        meta = result.meta
        is_reduced = meta.sync.rank_zero_only or (meta.sync.should and not meta.is_mean_reduction)
        if result.is_tensor and meta.on_epoch and not is_reduced:
            values[meta.name] = float(result.value) if "epoch_end" in meta.fx else None
    return values
