"""Draws the folders of the packages and their import direction, from the contracts in pyproject.toml: layers.svg."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from svg import Picture

HERE = Path(__file__).parent
# What stands in one row knows no more of the project than its color says.
COLORS = {"template": "green", "experiment": "blue", "any": "purple"}
TEMPLATE = {"module", "datamodule", "trainer", "callbacks"}
LEFT, RIGHT, ROW = 40, 414, 38


def layers_of(contracts: list[dict[str, object]], package: str) -> list[list[str]]:
    """Returns the names of each layer of a package, the highest first."""
    for contract in contracts:
        layers = contract.get("layers")
        if isinstance(layers, list) and layers[0].startswith(f"{package}."):
            return [re.findall(rf"{package}\.(\w+)", layer) for layer in layers]
    raise ValueError(f"pyproject.toml has no layers of {package}")


def main() -> None:
    """Writes layers.svg."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = layers_of(contracts, "lit_mnist")
    forbidden = next(
        set(one["forbidden_modules"]) for one in contracts if one["name"] == "The plugins know no experiment"
    )
    height = 58 + ROW * len(layers) + 112
    words = "; ".join(", ".join(names) for names in layers)
    picture = Picture(430, height, f"The layers of lit_mnist, the highest first; imports run downward: {words}.")
    picture.text(16, 28, "lit_mnist: imports run downward", style="bold")
    for number, names in enumerate(layers):
        y = 44 + number * ROW
        width = (RIGHT - LEFT - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            color = COLORS["any"] if f"lit_mnist.{name}" not in forbidden else COLORS["experiment"]
            color = COLORS["template"] if name in TEMPLATE else color
            left = LEFT + place * (width + 8)
            picture.box(left, y, width, 28, color, solid=True)
            picture.text(left + width / 2, y + 19, name, color, size=13, anchor="middle")
    bottom = 44 + ROW * len(layers)
    picture.line([(24, 48), (24, bottom - 14)], arrow=True)
    picture.line([(LEFT, bottom + 2), (RIGHT, bottom + 2)], dashed=True)
    picture.box(LEFT, bottom + 16, RIGHT - LEFT, 28, "orange", solid=True)
    picture.text(
        (LEFT + RIGHT) / 2, bottom + 35, "ddp_doctor: a package of its own", "orange", size=13, anchor="middle"
    )
    for number, (color, meaning) in enumerate(
        (("green", "the template, to copy"), ("blue", "knows the experiment"), ("purple", "for any Lightning code"))
    ):
        y = bottom + 66 + number * 20
        picture.box(LEFT, y, 13, 13, color, solid=True)
        picture.text(LEFT + 24, y + 11, meaning, size=12)
    (HERE / "layers.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
