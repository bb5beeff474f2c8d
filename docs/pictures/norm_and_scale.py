"""Draws numbers that a rank cannot see alone: statistics.svg (batch norm) and scale.svg (an overflow in float16)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from svg import Picture

HERE = Path(__file__).parent
# Mean and standard deviation of the inputs of one channel on each of two ranks.
RANKS = (("rank 0", -1.5, 0.8, "blue"), ("rank 1", 1.5, 0.8, "orange"))
STEPS, OVERFLOW, GROWTH = 24, 9, 6


def statistics() -> str:
    """Returns the distributions of two ranks, and that of the batch."""
    mean = sum(row[1] for row in RANKS) / len(RANKS)
    within = sum(row[2] ** 2 for row in RANKS) / len(RANKS)
    variance = within + sum((row[1] - mean) ** 2 for row in RANKS) / len(RANKS)
    title = (
        f"The inputs of a channel on rank 0 have the mean {RANKS[0][1]:g}, those on rank 1 {RANKS[1][1]:g}, both "
        f"with the variance {within:.2f}. The whole batch has the mean {mean:g} and the variance {variance:.2f}."
    )
    picture = Picture(430, 286, title)
    picture.text(16, 28, "one channel, two ranks, one batch", style="bold")

    def x(value: float) -> float:
        return 215 + value * 46

    def curve(center: float, deviation: float) -> list[tuple[float, float]]:
        values = [number / 20 for number in range(-84, 85)]
        heights = [math.exp(-0.5 * ((value - center) / deviation) ** 2) / deviation for value in values]
        return [
            (round(x(value), 1), round(192 - 84 * height, 1)) for value, height in zip(values, heights, strict=True)
        ]

    for name, center, deviation, color in RANKS:
        picture.line(curve(center, deviation), color)
        picture.line([(x(center), 192), (x(center), 84)], color, dashed=True)
        picture.text(x(center), 64, f"{name}: mean {center:g}", color, size=12, anchor="middle")
        picture.text(x(center), 78, f"variance {within:.2f}", color, size=12, anchor="middle")
    picture.line(curve(mean, math.sqrt(variance)), "purple")
    picture.text(x(mean), 132, "batch", "purple", size=12, anchor="middle", style="bold")
    picture.line([(16, 192), (414, 192)])
    for value in range(-4, 5, 2):
        picture.text(x(value), 210, str(value), "faint", size=12, anchor="middle")
    picture.text(16, 238, f"batch: mean {mean:g}, variance {variance:.2f}", "purple", size=12, style="bold")
    picture.text(16, 256, "DDP keeps the running mean of rank 0. The mean of both", size=12)
    picture.text(16, 274, f"variances is {within:.2f}: it lacks the distance of the means.", size=12)
    return picture.svg()


def scales() -> list[tuple[float, bool]]:
    """Returns the scale of each step of a real GradScaler, and whether it skipped the step."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=GROWTH)
    found = []
    for step in range(STEPS):
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale((weight * (math.inf if step == OVERFLOW else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scale, scaler.get_scale() < scale))
    return found


def scale() -> str:
    """Returns the scale over the steps of a training run with one overflow."""
    found = scales()
    title = (
        f"The loss scale doubles after {GROWTH} good steps. Step {OVERFLOW} overflows: it is skipped, and the scale is "
        "halved. The schedule must wait for that step."
    )
    picture = Picture(430, 270, title)
    picture.text(16, 28, "the loss scale over an overflow", style="bold")
    left, width = 70, 14
    for step, (value, skipped) in enumerate(found):
        y = 190 - 42 * math.log2(value / 512)
        picture.box(left + step * width, y, width - 2, 190 - y, "red" if skipped else "blue", solid=True)
    for value in sorted({value for value, _ in found}):
        picture.text(60, 194 - 42 * math.log2(value / 512), f"{value:g}", "faint", size=12, anchor="end")
    for step in range(0, STEPS, 6):
        picture.text(left + step * width + 6, 208, str(step), "faint", size=12, anchor="middle")
    (lost,) = (step for step, (_, skipped) in enumerate(found) if skipped)
    picture.text(left + lost * width + 18, 50, "an infinite gradient: skipped", "red", size=12, style="bold")
    picture.text(16, 236, f"A GradScaler that doubles after {GROWTH} good steps (default: 2000).", size=12)
    picture.text(16, 254, f"{STEPS} backward passes, {STEPS - 1} optimizer steps: the schedule must wait.", size=12)
    return picture.svg()


if __name__ == "__main__":
    (HERE / "statistics.svg").write_text(statistics(), encoding="utf-8")
    (HERE / "scale.svg").write_text(scale(), encoding="utf-8")
