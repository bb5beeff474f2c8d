"""The verdict of a comparison: each run against the reference, and where they part by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_mnist.comparison.cost import cost_of, files_of
from lit_mnist.comparison.equality import Difference, Run, compare_runs, largest_difference
from lit_mnist.comparison.runs import Options, ranks_of, train_with_trace
from lit_mnist.comparison.variants import Variant
from lit_mnist.engines.capabilities import INSTALL


def judge(
    options: Options,
    verified: dict[Variant, Run | str],
    skipped: dict[Variant, str | None],
    timed: dict[Variant, list[dict[str, Any]]],
    folder: Path,
    threads: int,
) -> dict[str, Any]:
    """Returns the reference, whether all engines are as equal to it as is expected, and each engine's figures."""
    runs = {variant: run for variant, run in verified.items() if isinstance(run, Run)}
    reference = _reference(options, runs)
    engines = []
    for variant in options.variants:
        entry: dict[str, Any] = {
            "name": variant.engine,
            "variant": None if variant.engine != "raw_ddp" else variant.start.replace("agent", "own launcher"),
            "world_size": ranks_of(options, variant) if variant in verified else None,
            "status": "skipped",
            "reason": skipped[variant],
            "install": INSTALL if INSTALL in (skipped[variant] or "") else None,
        }
        if variant in runs:
            run = runs[variant]
            entry |= {
                "status": "ran",
                "weights_sha256": [found["weights_sha256"] for found in run.traces],
                "loss": run.losses,
                "test": _test_figures(run.result["test"]),
                "comparison": None,
                "cost": cost_of(files_of(variant.engine), run.traces, timed[variant]),
            }
            if reference and variant != reference:
                entry["comparison"] = _compared(options, runs, reference, variant, folder, threads)
        elif variant in verified:
            entry |= {"status": "failed", "reason": verified[variant]}
        engines.append(entry)
    equal = all(entry["status"] != "failed" and (entry.get("comparison") or {"met": True})["met"] for entry in engines)
    name = engines[options.variants.index(reference)] if reference else {}
    return {
        "reference": f"{name['name']} ({name['variant']})" if name.get("variant") else name.get("name"),
        "equal": bool(runs) and equal,
        "engines": engines,
    }


def _reference(options: Options, runs: dict[Variant, Run]) -> Variant | None:
    """Returns the run that the others are compared with: raw DDP, or on one rank the engine without distribution."""
    preferred = Variant("single") if options.ranks == 1 else Variant("raw_ddp")
    same_ranks = [variant for variant in runs if len(runs[variant].traces) == options.ranks]
    return preferred if preferred in runs else next(iter([*same_ranks, *runs]), None)


def _compared(
    options: Options, runs: dict[Variant, Run], reference: Variant, variant: Variant, folder: Path, threads: int
) -> dict[str, Any]:
    """Returns how a run compares with the reference; where weights differ, both are run again to see by how much."""
    expected = "bits" if len(runs[reference].traces) == len(runs[variant].traces) else "rounding"
    if expected == "bits" and "parameter_server" in {variant.engine, reference.engine}:
        # Its servers add up in another order than a ring. Adam divides each gradient by its own size, so that the
        # rounding of one near zero, as of a bias before batch norm, becomes a whole step.
        optimizer = runs[variant].result["config"]["model"]["optimizer"]
        expected = "1e-05 relative" if optimizer == "sgd" or options.ranks <= 2 else "rounding"
    if "data_parallel" in {variant.engine, reference.engine}:
        # Its batch norm sees each GPU's samples alone, already in the first forward pass.
        expected = "samples"
    found = compare_runs(runs[reference], runs[variant], expected=expected)
    difference = found["first_difference"]
    if difference and difference["what"] == "weights":
        step, rank, tensor = difference["step"], difference["rank"], difference["tensor"]
        kept = []
        for one in (reference, variant):
            run_dir = folder / f"{variant.folder}-step-{step}" / one.folder
            run_dir.parent.mkdir(exist_ok=True)
            again = train_with_trace(options, one, run_dir, threads, f"--run.trace_step={step}")
            kept.append(again.kept_weights(rank, step) if isinstance(again, Run) else {})
        if all(tensor in weights for weights in kept):
            by = largest_difference({tensor: kept[0][tensor]}, kept[1])
            found["first_difference"] = Difference(step, "weights", rank, tensor, by).to_dict()
    return found


def _test_figures(test: dict[str, Any] | None) -> dict[str, Any] | None:
    if test is None:
        return None
    right = sum(row[n] for n, row in enumerate(test["confusion"]))
    return {"right": right, **{name: test[name] for name in ("accuracy", "count", "loss")}}
