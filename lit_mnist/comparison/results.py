"""The results of each engine in `comparison.json`: how it compares with the reference, and what it costs."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_mnist.comparison.equality import Difference, Run, compare_runs, largest_difference
from lit_mnist.comparison.runs import Options, Outcome, Variant, ranks_of, train_with_trace
from lit_mnist.comparison.tables import label
from lit_mnist.engines.capabilities import INSTALL
from lit_mnist.profiling.timing import spread

_NO_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}
_PACKAGE = Path(__file__).parents[1]
_TEMPLATE = ("module.py", "datamodule.py", "trainer.py", "callbacks.py")


def engine_results(
    options: Options, outcomes: Mapping[Variant, Outcome], timed: Mapping[Variant, Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """Returns the name of the reference, whether all engines agree as expected, and the results of each engine.

    Args:
        options: The options of the comparison.
        outcomes: The traced run of each variant, or why it was skipped or failed.
        timed: The results of the timed runs.
    """
    runs = {variant: found for variant, found in outcomes.items() if isinstance(found, Run)}
    reference = _reference(options, runs)
    engines = []
    for variant in options.variants:
        found = outcomes[variant]
        entry: dict[str, Any] = {
            "name": variant.engine,
            "variant": None if variant.engine != "raw_ddp" else variant.start.replace("agent", "own launcher"),
            "world_size": ranks_of(options, variant),
            "status": "ran",
            "reason": None,
            "install": None,
        }
        if isinstance(found, Run):
            entry |= {
                "weights_sha256": [trace["weights_sha256"] for trace in found.traces],
                "loss": found.losses,
                "test": _test_metrics(found.result["test"]),
                "comparison": None,
                "cost": _cost(variant.engine, found.traces, timed[variant]),
            }
            if reference and variant != reference:
                entry["comparison"] = _compare(options, runs, reference, variant)
        else:
            entry |= {"status": found.status, "reason": found.reason}
            if found.status == "skipped":
                entry |= {"world_size": None, "install": INSTALL if INSTALL in found.reason else None}
        engines.append(entry)
    failed = any(entry["status"] == "failed" for entry in engines)
    different = any(not entry["comparison"]["met"] for entry in engines if entry.get("comparison"))
    return {
        "reference": label(engines[options.variants.index(reference)]) if reference else None,
        "equal": bool(runs) and not failed and not different,
        "engines": engines,
    }


def _reference(options: Options, runs: Mapping[Variant, Run]) -> Variant | None:
    """Returns the variant that the others are compared with: `raw_ddp` or, on one rank, `single`."""
    preferred = Variant("single") if options.ranks == 1 else Variant("raw_ddp")
    same_ranks = [variant for variant in runs if len(runs[variant].traces) == options.ranks]
    return preferred if preferred in runs else next(iter([*same_ranks, *runs]), None)


def _compare(options: Options, runs: Mapping[Variant, Run], reference: Variant, variant: Variant) -> dict[str, Any]:
    """Compares a run with the reference; if the weights differ, runs both again to measure by how much."""
    expected = _expected(options, runs, reference, variant)
    found = compare_runs(runs[reference], runs[variant], expected=expected)
    difference = found["first_difference"]
    if difference and difference["what"] == "weights":
        step, rank, tensor = difference["step"], difference["rank"], difference["tensor"]
        kept = []
        for one in (reference, variant):
            run_dir = options.folder / f"{variant.folder}-step-{step}" / one.folder
            run_dir.parent.mkdir(exist_ok=True)
            options.display.begin(f"{one.name}  again, which keeps the weights of step {step}")
            again = train_with_trace(options, one, run_dir, f"--run.trace_step={step}")
            kept.append(again.kept_weights(rank, step) if isinstance(again, Run) else {})
        if all(tensor in weights for weights in kept):
            by = largest_difference({tensor: kept[0][tensor]}, kept[1])
            found["first_difference"] = Difference(step, "weights", rank, tensor, by).to_dict()
    return found


def _expected(options: Options, runs: Mapping[Variant, Run], reference: Variant, variant: Variant) -> str:
    """Returns how closely a run must agree with the reference, as `compare_runs` expects it."""
    engines = {variant.engine, reference.engine}
    if "data_parallel" in engines:
        # Its batch norm uses the samples of each GPU alone, already in the first forward pass.
        return "samples"
    if len(runs[reference].traces) != len(runs[variant].traces):
        return "rounding"
    if "parameter_server" in engines:
        # Its servers add in another order than a ring. Adam divides each gradient by its own size, which amplifies the
        # rounding error of a gradient near zero, such as that of a bias before batch norm, to a whole step.
        optimizer = runs[variant].result["config"]["model"]["optimizer"]
        return "1e-05 relative" if optimizer == "sgd" or options.ranks <= 2 else "rounding"
    return "bits"


def _test_metrics(test: dict[str, Any] | None) -> dict[str, Any] | None:
    if test is None:
        return None
    right = sum(row[n] for n, row in enumerate(test["confusion"]))
    return {"right": right, **{name: test[name] for name in ("accuracy", "count", "loss")}}


def _cost(engine: str, traces: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the costs of an engine, from the traffic of its busiest rank and the results of its timed runs."""
    traffic = [found["traffic"] for found in traces if found["traffic"]["steps"]]
    # Lightning also needs the template, which its Trainer calls.
    files = [f"engines/{engine}.py", *(_TEMPLATE if engine == "lightning" else ())]
    return {
        "images_per_s": spread([result["train"]["images_per_s"] for result in timed]),
        "seconds_to_first_step": spread([result["seconds_to_first_step"] for result in timed]),
        "peak_memory_bytes": spread([result["peak_memory_bytes"] for result in timed]),
        "bytes_sent_per_step": _largest([found["bytes_sent"] for found in traffic]),
        "payload_bytes_per_step": _largest([found["payload_bytes"] for found in traffic]),
        "collectives_per_step": max(
            (found["collectives"] for found in traffic), key=lambda calls: sum(calls.values()), default=None
        ),
        "lines_of_code": sum(lines_of_code(_PACKAGE / file) for file in files),
    }


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def lines_of_code(path: Path) -> int:
    """Counts the lines of code in a Python file, without blank lines, comments and docstrings."""
    source = path.read_text()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)
