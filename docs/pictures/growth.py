"""Draws steps over a network, from `docs/bench/growth.json`: growth.svg (predicted and measured), pays.svg (what pays).

The data are those of `python -m benchmarks --topics growth`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from svg import Picture

HERE = Path(__file__).parent
NETS = {"ConvNet": "ConvNet, 29,034 parameters", "perceptron": "perceptron, 1.86 million parameters"}
ALONE, DDP = "no communication", "DDP"
LATENCIES = {0.1: "blue", 1: "orange", 10: "purple"}
VARIANTS = {"DDP, four buckets": "red", "DDP, bfloat16": "blue", "DDP, PowerSGD": "orange", "local SGD": "green"}
LEFT, WIDTH, GAP, HEIGHT = 56, 160, 24, 150

Point = tuple[float, float]


def panels(
    picture: Picture, top: float, title: str, links: Sequence[Any], draw: Callable[[float, float, Any], None]
) -> None:
    """Adds a panel for each bandwidth; `draw` receives the left edge, the lower edge, and the links of a bandwidth."""
    picture.text(16, top, title, size=13, style="bold")
    for number, gbit in enumerate(sorted({link["gbit_per_s"] for link in links})):
        left, bottom = LEFT + number * (WIDTH + GAP), top + 34 + HEIGHT
        picture.text(left, top + 20, f"{gbit:g} Gbit/s", "faint", size=12)
        picture.line([(left, top + 30), (left, bottom), (left + WIDTH, bottom)])
        draw(left, bottom, [link for link in links if link["gbit_per_s"] == gbit])


def steps_of(link: Any, net: str, variant: str) -> dict[int, Any]:
    """Returns the steps of a variant by the number of ranks."""
    return {row["ranks"]: row for row in link["steps"] if (row["net"], row["variant"]) == (net, variant)}


def growth(links: Sequence[Any]) -> str:
    """Returns the step of DDP over the number of ranks."""
    rows = [row for link in links for row in link["steps"] if row["variant"] == DDP]
    errors = sorted(abs(row["measured_ms"] / row["predicted_ms"] - 1) for row in rows if row["ranks"] > 2)
    half = errors[len(errors) // 2]
    picture = Picture(
        430,
        582,
        f"The step of DDP on 2, 4 and 8 ranks over links of 1 and 10 Gbit/s and 0.1, 1 and 10 ms, predicted and "
        f"measured. Half of the steps on 4 and 8 ranks differ from the prediction by at most {100 * half:.0f} %.",
    )
    picture.text(16, 28, "a step with DDP: predicted (lines), measured (dots)", style="bold")
    for (net, title), top in zip(NETS.items(), (56, 278), strict=True):
        values = [row[key] for row in rows if row["net"] == net for key in ("measured_ms", "predicted_ms")]
        low = min(row["measured_ms"] for link in links for row in steps_of(link, net, ALONE).values())
        scale = (math.log(0.8 * low), math.log(1.2 * max(values)))

        def place(left: float, bottom: float, ranks: int, value: float, scale: Point = scale) -> Point:
            share = (math.log(value) - scale[0]) / (scale[1] - scale[0])
            return round(left + (WIDTH - 24) * math.log2(ranks / 2) / 2 + 12, 1), round(bottom - HEIGHT * share, 1)

        def draw(
            left: float, bottom: float, some: Sequence[Any], net: str = net, place: Any = place, scale: Point = scale
        ) -> None:
            for ranks in (2, 4, 8):
                name = f"{ranks} ranks" if ranks == 2 else f"{ranks}"
                picture.text(place(left, bottom, ranks, 1)[0], bottom + 16, name, "faint", size=12, anchor="middle")
            if left == LEFT:
                for value in (
                    value for value in (20, 50, 100, 200, 500, 1000) if scale[0] < math.log(value) < scale[1]
                ):
                    y = place(left, bottom, 2, value)[1]
                    picture.text(left - 6, y + 4, f"{value} ms", "faint", size=11, anchor="end")
            for link in some:
                color = LATENCIES[link["latency_ms"]]
                found = steps_of(link, net, DDP)
                picture.line([place(left, bottom, ranks, row["predicted_ms"]) for ranks, row in found.items()], color)
                for ranks, row in found.items():
                    picture.dot(*place(left, bottom, ranks, row["measured_ms"]), color)
            alone = steps_of(some[0], net, ALONE)
            picture.line(
                [place(left, bottom, ranks, row["measured_ms"]) for ranks, row in alone.items()], "faint", dashed=True
            )

        panels(picture, top, title, links, draw)
    picture.text(16, 512, "latency:", "faint", size=12)
    for number, (latency, color) in enumerate(LATENCIES.items()):
        picture.text(76 + 66 * number, 512, f"{latency:g} ms", color, size=12, style="bold")
    picture.text(284, 512, "dashed: no exchange", "faint", size=12)
    picture.text(16, 538, "The lines follow from the step without communication, the", size=12)
    picture.text(16, 556, "parameters and two all-reduces of two ranks. All share two cores.", size=12)
    return picture.svg()


def pays(links: Sequence[Any]) -> str:
    """Returns the step of each variant on eight ranks, relative to DDP, over the latency."""
    picture = Picture(
        430,
        582,
        "The step of each variant on eight ranks, divided by that of DDP, over the latency. Below 1, it saves time.",
    )
    picture.text(16, 28, "what pays on eight ranks: step / step with DDP", style="bold")
    for (net, title), top in zip(NETS.items(), (56, 278), strict=True):

        def draw(left: float, bottom: float, some: Sequence[Any], net: str = net) -> None:
            def place(number: int, value: float) -> Point:
                return round(left + 12 + number * (WIDTH - 36) / 2, 1), round(bottom - HEIGHT * value / 2.5, 1)

            for value in (0.5, 1, 1.5, 2, 2.5):
                y = place(0, value)[1]
                picture.line([(left, y), (left + WIDTH, y)], dashed=value != 1)
                if left == LEFT:
                    picture.text(left - 6, y + 4, f"{value:g}", "faint", size=11, anchor="end")
            for number, link in enumerate(some):
                picture.text(
                    place(number, 0)[0], bottom + 16, f"{link['latency_ms']:g} ms", "faint", size=12, anchor="middle"
                )
            for variant, color in VARIANTS.items():
                points = []
                for number, link in enumerate(some):
                    ddp, row = steps_of(link, net, DDP)[8], steps_of(link, net, variant).get(8)
                    if row:
                        points.append(place(number, row["measured_ms"] / ddp["measured_ms"]))
                picture.line(points, color)
                for point in points:
                    picture.dot(*point, color)

        panels(picture, top, title, links, draw)
    names = [(name.removeprefix("DDP, "), color) for name, color in VARIANTS.items()]
    for x, (name, color) in zip((16, 116, 206, 296), names, strict=True):
        picture.text(x, 512, name, color, size=12, style="bold")
    picture.text(16, 538, "Local SGD averages the weights every 8 steps. Except the", size=12)
    picture.text(16, 556, "buckets, each of them computes something else than DDP.", size=12)
    return picture.svg()


if __name__ == "__main__":
    bench = json.loads((HERE.parent / "bench" / "growth.json").read_text())
    measured = bench["topics"]["growth"]["growth"]
    (HERE / "growth.svg").write_text(growth(measured))
    (HERE / "pays.svg").write_text(pays(measured))
