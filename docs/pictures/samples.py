"""Draws which samples the ranks use, as the two samplers give them: batches.svg and padding.svg."""

from __future__ import annotations

from pathlib import Path

from svg import Picture
from torch.utils.data import DistributedSampler

from lit_mnist.distributed.sample_order import rank_rows

HERE = Path(__file__).parent
COLORS = ("blue", "orange", "green", "purple")


def batches() -> str:
    """Returns 16 samples in two steps of a global batch of 8, on 1, 2 and 4 ranks."""
    batch, samples = 8, 16
    title = (
        "Sixteen samples. If global batches of eight are split over the ranks, step 0 has samples 0 to 7 on 1, 2 and 4 "
        "ranks. With DistributedSampler and four samples per rank, step 0 has 4, 8 and 16 samples."
    )
    picture = Picture(430, 366, title)
    y = 28.0
    for heading, cut in (
        ("a global batch of 8, split over the ranks", True),
        ("DistributedSampler, 4 per rank", False),
    ):
        picture.text(16, y, heading, style="bold")
        for ranks in (1, 2, 4):
            y += 34
            picture.text(16, y + 16, f"{ranks} rank" + "s" * (ranks > 1), "faint", size=12)
            steps = split(samples, batch, ranks) if cut else sampled(samples, ranks)
            for step, rows in enumerate(steps):
                for rank, row in enumerate(rows):
                    color = "faint" if step else COLORS[rank]
                    for sample in row:
                        if step == 0:
                            picture.box(78 + sample * 21, y, 19, 24, color, solid=True)
                        picture.text(87.5 + sample * 21, y + 16, str(rank), color, size=12, anchor="middle")
        y += 56
    picture.text(16, y - 8, "Each cell is a sample, in the order of the epoch, with its rank.", "faint", size=12)
    picture.text(16, y + 10, "Boxes: the samples of step 0. No shuffling here.", "faint", size=12)
    return picture.svg()


def split(samples: int, batch: int, ranks: int) -> list[list[list[int]]]:
    """Returns the samples of each step and rank if a global batch is split."""
    steps = [list(range(start, start + batch)) for start in range(0, samples, batch)]
    return [[rows[rank_rows(batch, rank, ranks)] for rank in range(ranks)] for rows in steps]


def sampled(samples: int, ranks: int, per_rank: int = 4) -> list[list[list[int]]]:
    """Returns the samples of each step and rank with torch's sampler."""
    own = [list(DistributedSampler(range(samples), ranks, rank, shuffle=False)) for rank in range(ranks)]
    return [[rows[start : start + per_rank] for rows in own] for start in range(0, len(own[0]), per_rank)]


def padding() -> str:
    """Returns the samples of an evaluation of 100 samples on three ranks, with torch's sampler."""
    given = [list(DistributedSampler(range(100), 3, rank, shuffle=False)) for rank in range(3)]
    seen: set[int] = set()
    total = sum(map(len, given))
    picture = Picture(430, 256, f"Three ranks evaluate {total} of 100 samples: two samples count twice.")
    picture.text(16, 28, f"{total} of 100 samples evaluated", style="bold")
    for rank, row in enumerate(given):
        y = 48 + rank * 56
        picture.text(16, y + 20, f"rank {rank}", "faint", size=12)
        for place, sample in enumerate(row):
            twice = sample in seen
            seen.add(sample)
            x, top = 70 + place % 17 * 20, y + place // 17 * 20
            picture.box(x, top, 17, 17, "red" if twice else COLORS[rank], solid=True)
            if twice:
                picture.text(x + 8.5, top + 13, str(sample), "red", size=12, anchor="middle", style="bold")
    picture.text(16, 226, "DistributedSampler repeats samples 0 and 1, so that each", size=13)
    picture.text(16, 242, "rank has 34. The red ones count twice in every mean.", size=13)
    return picture.svg()


if __name__ == "__main__":
    (HERE / "batches.svg").write_text(batches(), encoding="utf-8")
    (HERE / "padding.svg").write_text(padding(), encoding="utf-8")
