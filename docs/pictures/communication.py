"""Draws what the ranks send: overlap.svg (all-reduce during the backward pass) and ring.svg (ring and server)."""

from __future__ import annotations

import math
from pathlib import Path

from svg import Picture

HERE = Path(__file__).parent
COLORS = ("blue", "orange", "green", "purple")
GRADIENT = 4_000_000


def overlap() -> str:
    """Returns two ranks whose buckets are reduced while the backward pass continues."""
    title = (
        "Two ranks compute the gradients of their half of the batch, from the last layer to the first. As soon as a "
        "bucket is full on both, it is averaged while the backward pass continues, and both take the same step."
    )
    picture = Picture(430, 322, title)
    picture.text(16, 28, "one step of DDP on two ranks", style="bold")
    for rank, top in ((0, 52), (1, 202)):
        picture.text(16, top + 20, f"rank {rank}", "faint", size=12)
        for left, width, words, color in ((66, 78, "forward", "blue"), (148, 78, "bucket 2", "orange")):
            block(picture, left, top, width, words, color)
        block(picture, 230, top, 78, "bucket 1", "orange")
        block(picture, 352, top, 62, "step", "green")
    picture.text(228, 46, "backward: last layer first", "orange", size=12, anchor="middle")
    picture.text(16, 148, "network", "faint", size=12)
    for left, words in ((230, "mean 2"), (312, "mean 1")):
        block(picture, left, 128, 78 if left == 230 else 36, words if left == 230 else "1", "purple")
        for top, end in ((84, 126), (200, 162)):
            picture.line([(left - 2, top), (left + 16, end)], "purple", arrow=True)
    picture.text(16, 262, "The mean of bucket 2 travels while bucket 1 is computed.", size=12)
    picture.text(16, 282, "Only the last bucket makes the ranks wait. Both take the", size=12)
    picture.text(16, 302, "same step with the same mean: the weights stay equal.", size=12)
    return picture.svg()


def block(picture: Picture, left: float, top: float, width: float, words: str, color: str) -> None:
    """Adds a box with a word in it."""
    picture.box(left, top, width, 32, color, solid=True)
    picture.text(left + width / 2, top + 20, words, color, size=12, anchor="middle")


def ring() -> str:
    """Returns four ranks as a ring, and with rank 0 as the server, with the bytes that each sends."""
    ranks = len(COLORS)
    each = 2 * (ranks - 1) * GRADIENT // ranks
    busiest = (ranks - 1) * GRADIENT
    title = (
        f"An all-reduce of {GRADIENT:,} bytes on {ranks} ranks. In a ring, each rank sends {each:,} bytes to its "
        f"neighbor. With rank 0 as the server, it sends {busiest:,} bytes, and the others {GRADIENT:,} each."
    )
    picture = Picture(430, 322, title)
    for left, heading in ((108, "ring"), (322, "parameter server")):
        picture.text(left, 28, heading, anchor="middle", style="bold")
    for rank, color in enumerate(COLORS):
        angle = math.radians(90 * rank - 90)
        x, y = 108 + 72 * math.cos(angle), 150 + 72 * math.sin(angle)
        node(picture, x, y, rank, color)
        picture.text(x, y + 34, f"{each / 1e6:g} MB", "faint", size=12, anchor="middle")
        following = math.radians(90 * rank)
        picture.line(
            shortened((x, y), (108 + 72 * math.cos(following), 150 + 72 * math.sin(following))), color, arrow=True
        )
    node(picture, 322, 84, 0, "blue")
    picture.text(322, 60, f"{busiest / 1e6:g} MB", "red", size=12, anchor="middle", style="bold")
    for rank in range(1, ranks):
        x = 322 + (rank - 2) * 72
        node(picture, x, 214, rank, COLORS[rank])
        picture.text(x, 248, f"{GRADIENT / 1e6:g} MB", "faint", size=12, anchor="middle")
        start, end = shortened((x, 214), (322, 84))
        picture.line([start, end], COLORS[rank], arrow=True)
        picture.line([(end[0] + 9, end[1]), (start[0] + 9, start[1])], "blue", arrow=True)
    picture.text(16, 286, f"Bytes sent to add up a gradient of {GRADIENT / 1e6:g} MB. The total is", size=12)
    picture.text(
        16, 304, f"{ranks * each / 1e6:g} MB in both; the busiest rank sends {busiest / each:g} times as much.", size=12
    )
    return picture.svg()


def node(picture: Picture, x: float, y: float, rank: int, color: str) -> None:
    """Adds a rank."""
    picture.box(x - 16, y - 14, 32, 28, color, solid=True)
    picture.text(x, y + 5, str(rank), color, anchor="middle", style="bold")


def shortened(start: tuple[float, float], end: tuple[float, float], gap: float = 26) -> list[tuple[float, float]]:
    """Returns a line without its two ends, where the ranks are."""
    length = math.dist(start, end)
    dx, dy = ((end[axis] - start[axis]) / length * gap for axis in (0, 1))
    return [(start[0] + dx, start[1] + dy), (end[0] - dx, end[1] - dy)]


if __name__ == "__main__":
    (HERE / "overlap.svg").write_text(overlap(), encoding="utf-8")
    (HERE / "ring.svg").write_text(ring(), encoding="utf-8")
