"""The places where measurements reach into torch's private parts, each with a test that notices a change.

1. DDP's own measurements, which are a prototype of torch's: `measure_every_step` and `hidden_all_reduce_ms`. Noticed by
   `test_all_parts_are_timed_and_make_up_the_step` in tests/benchmarks/test_waterfall.py.
2. torch's profiler knows the types of what an operation was given, and its events tell them in newer releases only:
   `operations_of` asks below them. Noticed by `test_the_formulas_count_what_a_rank_sends` in
   tests/benchmarks/test_scaling_model.py.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile


def measure_every_step(model: DistributedDataParallel) -> None:
    """Lets DDP measure its communication in each step, instead of in each hundredth: a prototype of torch's."""
    model._set_ddp_runtime_logging_sample_rate(1)


def hidden_all_reduce_ms(model: DistributedDataParallel) -> float | None:
    """Returns how long gradients travelled while others were computed, in milliseconds per step, as DDP measures it."""
    found = model._get_ddp_logging_data()
    if found.get("num_buckets_reduced") == 1:
        # It leaves with the last gradient: what DDP counts is the time that its launch takes.
        return 0.0
    hidden = found.get("avg_backward_compute_comm_overlap_time")
    return None if hidden is None else float(hidden) / 1e6


def operations_of(profiled: profile) -> list[tuple[str, list[list[int]], list[str]]]:
    """Returns the operations that a profiler has seen: name, and the shapes and types of what each was given."""
    results = profiled.profiler.kineto_results if profiled.profiler else None
    return [(event.name(), event.shapes(), event.dtypes()) for event in (results.events() if results else ())]
