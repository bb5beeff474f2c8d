"""The private parts of torch that the measurements use, with the tests that detect a change in torch.

- `measure_every_step` and `hidden_all_reduce_ms` use a prototype of DDP's own measurements. Detected by
  `test_all_parts_are_timed_and_make_up_the_step` in tests/benchmarks/test_waterfall.py.
- `list_operations` reads the dtypes of arguments from torch's profiler, whose public events have them only in
  newer releases. Detected by `test_all_engines_are_bit_identical_on_two_ranks` in tests/comparison/test_compare.py.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile


def measure_every_step(model: DistributedDataParallel) -> None:
    """Lets DDP measure its communication in every step instead of every hundredth step."""
    model._set_ddp_runtime_logging_sample_rate(1)


def hidden_all_reduce_ms(model: DistributedDataParallel) -> float | None:
    """Returns the overlap of the all-reduce with the backward pass in milliseconds per step; None if unknown."""
    found = model._get_ddp_logging_data()
    if found.get("num_buckets_reduced") == 1:
        # The only bucket is reduced after the last gradient. DDP would return the time to launch the all-reduce.
        return 0.0
    hidden = found.get("avg_backward_compute_comm_overlap_time")
    return None if hidden is None else float(hidden) / 1e6


def list_operations(profiled: profile) -> list[tuple[str, list[list[int]], list[str]]]:
    """Returns the name of each operation of a profile, and the shapes and dtypes of its arguments."""
    results = profiled.profiler.kineto_results if profiled.profiler else None
    return [(event.name(), event.shapes(), event.dtypes()) for event in (results.events() if results else ())]
