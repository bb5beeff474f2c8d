"""Truncated checkpoints and flipped bits are found."""

from __future__ import annotations

import json
import os
import random
import signal
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Program
from processes import forked

from faults.conftest import SMALL, RecordMetric
from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.errors import InputError

TINY: tuple[object, ...] = (*SMALL, "--max-steps", 2, "--model.schedule", "constant")


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    return shared_program.train(*TINY)


@pytest.fixture(scope="module")
def trained_basicnet(shared_program: Program) -> Path:
    return shared_program.train(*TINY, "--model.net", "basicnet")


@dataclass
class Damaged:
    """The outcomes for damaged copies of a checkpoint."""

    truncated: int = 0
    flipped: int = 0


def damage(path: Path, folder: Path, *, truncations: int, flips: int) -> Damaged:
    """Damages copies of a checkpoint in two forked processes, and reads each one.

    Every second flip is outside of the tensors' bytes: they are nearly all of the file, and its structure the rest.
    """
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        inside = [(entry.header_offset, entry.file_size) for entry in archive.infolist() if "/data/" in entry.filename]
    outside = set(range(len(whole))).difference(*(range(start + 200, start + size) for start, size in inside))
    structure = sorted(outside)

    def check(copied: Path) -> None:
        with pytest.raises(InputError, match=r"damaged\.ckpt is damaged"):
            read_checkpoint(copied)

    def work(part: int) -> int:
        signal.alarm(800)
        copied, place = folder / f"{part}" / "damaged.ckpt", folder / f"{part}" / "place.txt"
        drawn, found = random.Random(flips + part), Damaged()
        for number in range(part, truncations, 2):
            copied.write_bytes(whole[: len(whole) * number // truncations])
            check(copied)
            found.truncated += 1
        copied.write_bytes(whole)
        with copied.open("r+b", buffering=0) as file:
            for number in range(flips // 2):
                byte = drawn.choice(structure) if number % 2 else drawn.randrange(len(whole))
                bit = drawn.randrange(8)
                place.write_text(f"byte {byte}, bit {bit}")
                os.pwrite(file.fileno(), bytes([whole[byte] ^ (1 << bit)]), byte)
                check(copied)
                found.flipped += 1
                os.pwrite(file.fileno(), whole[byte : byte + 1], byte)
        (folder / f"{part}" / "damaged.json").write_text(json.dumps(vars(found)))
        return 0

    for part in (0, 1):
        (folder / f"{part}").mkdir()
    with forked(lambda: work(0), folder / "0") as first, forked(lambda: work(1), folder / "1") as second:
        for part, process in enumerate((first, second)):
            _, status = os.waitpid(process, 0)
            message = "".join((folder / f"{part}" / name).read_text() for name in ("place.txt", "stderr.txt"))
            assert os.waitstatus_to_exitcode(status) == 0, message
    halves = [json.loads((folder / f"{part}" / "damaged.json").read_text()) for part in (0, 1)]
    return Damaged(**{name: sum(half[name] for half in halves) for name in halves[0]})


@pytest.mark.parametrize(
    ("net", "flips"),
    [
        ("convnet", 500),
        ("basicnet", 100),
        pytest.param("convnet", 8000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param("basicnet", 2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_every_damage_is_found(
    tmp_path: Path, request: pytest.FixtureRequest, record_metric: RecordMetric, net: str, flips: int
) -> None:
    folder = request.getfixturevalue("trained" if net == "convnet" else "trained_basicnet")
    done = damage(folder / "checkpoints" / "last.ckpt", tmp_path, truncations=50, flips=flips)
    assert (done.truncated, done.flipped) == (50, flips)
    record_metric(f"{net} checkpoints damaged", f"50 truncations and {flips} flipped bits: all found")
