"""The bench: rounds and ratios, what it refuses, and a real topic from the command line to the page."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Program

from benchmarks.pages.page import headline, text, write_bench
from benchmarks.programs import printed_numbers, run_python
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic, run_rounds
from benchmarks.topics import TOPICS
from lit_mnist.errors import InputError, StoppedError


def counting(name: str, values: list[float], order: list[str]) -> Measurement:
    """Returns a measurement that gives some values, one after the other, and notes its turns."""
    left: Iterator[float] = iter(values)

    def take(folder: Path) -> Numbers:
        assert folder.is_dir()
        assert not list(folder.iterdir())
        order.append(name)
        return {"images_per_s": next(left), "memory_bytes": 1024.0}

    return Measurement(name, take)


def taken(folder: Path, order: list[str]) -> dict[str, object]:
    topic = Topic(
        "speed",
        "Speed & <co>",
        [counting("a", [10.0, 30.0, 20.0], order), counting("b", [20.0, 40.0, 80.0], order)],
        [Ratio("a", "b", at_least=0.5), Ratio("b", "a", at_most=1.5), Ratio("a", "b")],
        lambda rows: {"most": max(numbers["images_per_s"] for numbers in rows["b"])},
        ["A note."],
    )
    return {
        "machine": {"processor": "<one>", "cores": 2},
        "repeats": 3,
        "topics": {"speed": run_rounds(topic, 3, folder, lambda _: None)},
        "versions": {"torch": "2"},
        "commit": None,
        "command": "python -m benchmarks",
    }


def test_measurements_take_turns_and_ratios_are_those_of_a_round(tmp_path: Path) -> None:
    order: list[str] = []
    found = taken(tmp_path, order)["topics"]["speed"]  # type: ignore[index]
    assert order == ["a", "b"] * 3
    first, second = found["rows"]
    assert first["runs"] == [10.0, 30.0, 20.0]
    assert (first["median"], first["lowest"], first["highest"], first["unit"]) == (20.0, 10.0, 30.0, "images/s")
    assert second["others"] == {"memory_bytes": 1024.0}
    least, most, unasked = found["ratios"]
    assert least["runs"] == [0.5, 0.75, 0.25]
    assert (least["median"], least["met"]) == (0.5, True)
    assert (most["median"], most["met"]) == (2.0, False)
    assert unasked["met"] is None
    assert found["most"] == 80.0


def test_an_interrupted_round_leaves_those_before_it(tmp_path: Path) -> None:
    def stopped(folder: Path) -> Numbers:
        raise StoppedError("Stopped by SIGTERM.", signal.SIGTERM)

    def second(folder: Path) -> Numbers:
        return counting("b", [20.0], []).take(folder) if not kept else stopped(folder)

    kept: list[dict[str, Any]] = []
    measurements = [counting("a", [10.0, 30.0], []), Measurement("b", second)]
    with pytest.raises(StoppedError):
        run_rounds(Topic("speed", "Speed", measurements, [Ratio("a", "b")]), 2, tmp_path, lambda _: None, kept.append)
    (found,) = kept
    assert found["repeats"] == 1
    assert [row["runs"] for row in found["rows"]] == [[10.0], [20.0]]
    assert found["ratios"][0]["runs"] == [0.5]


def test_the_page_and_the_text_show_which_ratios_were_reached(tmp_path: Path) -> None:
    found = taken(tmp_path, [])
    write_bench(tmp_path / "bench.html", found)
    page = (tmp_path / "bench.html").read_text()
    assert "1 of 2 ratios as required" in page
    assert "Speed &amp; &lt;co&gt;" in page
    assert "&lt;one&gt;" in page
    for part in ("<script", "<co>", "<one>"):
        assert part not in page
    told = text(found)
    assert told.splitlines()[-1] == headline(found) == "1 of 2 ratios as required"
    assert "at least 0.500" in told
    assert "20 images/s" in told


def test_a_program_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    assert printed_numbers("-c", "print('x'); print('{\"seconds\": 3}')", folder=tmp_path) == {"seconds": 3.0}
    with pytest.raises(InputError, match=r"(?s)exit code 7.*the last words"):
        run_python("-c", "import sys; print('the last words', file=sys.stderr); sys.exit(7)", folder=tmp_path)
    with pytest.raises(InputError, match="the memory was full"):
        run_python("-c", "import os; os.kill(os.getpid(), 9)", folder=tmp_path)


def test_a_program_finds_the_packages_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    printed = run_python("-c", "import benchmarks, lit_mnist; print(benchmarks.__file__)", folder=tmp_path)
    assert Path(printed.strip()).parents[1] == ROOT


def test_the_names_of_a_topic_s_ratios_are_those_of_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, make in TOPICS.items():
        topic = make()
        assert topic.name == name
        names = [measurement.name for measurement in topic.measurements]
        assert len(set(names)) == len(names)
        assert {part for ratio in topic.ratios for part in (ratio.of, ratio.to)} <= set(names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--topics", "starts"), "did you mean start?"),
        (("--topics", ""), "Unknown topic ''"),
        (("--topics", "gpu"), "this machine has none"),
        (("--repeats", "0"), "at least 1"),
        (("--repeats", "many"), "--repeats"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_what_it_cannot_measure_is_refused(program: Program, words: tuple[str, ...], message: str) -> None:
    done = program(*words, engine="benchmarks")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (program.folder / "runs").exists()


@pytest.mark.slow
def test_a_topic_is_measured_from_the_command_line_to_the_page(program: Program) -> None:
    done = program("--topics", "evaluation", "--repeats", 1, "--run-dir", "bench", engine="benchmarks")
    assert done.code == 0, done.out + done.err
    folder = program.folder / "bench"
    found = json.loads((folder / "bench.json").read_text())
    assert list(found["topics"]) == ["evaluation"]
    assert all(row["median"] > 0 and len(row["runs"]) == 1 for row in found["topics"]["evaluation"]["rows"])
    assert "Evaluation of the 10,000 test images" in done.out
    assert "10,000" in (folder / "bench.html").read_text()
