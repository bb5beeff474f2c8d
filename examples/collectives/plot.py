"""A plot of the benchmark: latency and bus bandwidth over the message size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.collectives.bench import in_words

FORMATS = (".png", ".svg", ".pdf")

_NAMES = {"all_reduce": "dist.all_reduce (gloo)", "ring": "ring, point to point", "server": "parameter server"}
_STYLES = {
    "all_reduce": {"color": "#2d63ad", "marker": "o"},
    "ring": {"color": "#c65a17", "marker": "s"},
    "server": {"color": "#666c74", "marker": "^"},
}


def write_plot(path: Path, measured: Mapping[str, Any]) -> None:
    """Plots the benchmark, with the quartiles of the measurements as a band.

    Args:
        path: File to write, with one of the suffixes `FORMATS`.
        measured: The result of `bench`.

    Raises:
        OSError: The file cannot be written.
    """
    # The tour does not plot, and does not need this import.
    from matplotlib.figure import Figure

    image = Figure(figsize=(10, 4.2), layout="constrained")
    latency, bandwidth = image.subplots(1, 2)
    share = 2 * (measured["world_size"] - 1) / measured["world_size"]
    for name, style in _STYLES.items():
        figures = [figure for figure in measured["figures"] if figure["operation"] == name]
        x = [figure["bytes"] for figure in figures]
        latency.plot(x, [figure["seconds"] * 1e6 for figure in figures], label=_NAMES[name], **style)
        bandwidth.plot(x, [figure["bus_gb_per_s"] for figure in figures], label=_NAMES[name], **style)
        first, last = ([figure[key] for figure in figures] for key in ("seconds_q1", "seconds_q3"))
        band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
        latency.fill_between(x, [value * 1e6 for value in first], [value * 1e6 for value in last], **band)
        rates = ([size / value * share / 1e9 for size, value in zip(x, times, strict=True)] for times in (last, first))
        bandwidth.fill_between(x, *rates, **band)
    latency.set(title="Latency", ylabel="microseconds", yscale="log")
    bandwidth.set(title="Bus bandwidth", ylabel="GB/s", ylim=(0, None))
    for axes in (latency, bandwidth):
        ticks = sorted({figure["bytes"] for figure in measured["figures"]})
        axes.set_xscale("log", base=4)
        axes.set_xticks(ticks, [in_words(size) for size in ticks], rotation=45)
        axes.tick_params(axis="x", which="minor", length=0)
        axes.set_xlabel("bytes of each rank's tensor")
        axes.grid(color="#e3e3dd")
        axes.spines[["top", "right"]].set_visible(False)
    latency.legend(frameon=False)
    image.suptitle(f"All-reduce on {measured['world_size']} ranks, medians and quartiles of the measurements")
    image.savefig(path, dpi=150)
