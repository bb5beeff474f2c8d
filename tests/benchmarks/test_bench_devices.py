"""The bench of a whole training: its time is steps times a step, and what is not measured is stated."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_page import bench_page
from conftest import Program
from html_page import SPACE, Page

from benchmarks import stage
from benchmarks.devices import analyse, devices, name_of, topic_of
from benchmarks.pages.page import text, write_bench
from benchmarks.programs import run_python
from benchmarks.recipe import Recipe
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic, run_rounds
from benchmarks.scaling import RAW_DDP, SERVER
from benchmarks.stage import DATA_PARALLEL, SINGLE, Elsewhere, Stage
from lit_mnist.distributed.devices import Devices
from lit_mnist.experiment import Experiment

TINY = """
model: {net: basicnet}
data: {batch_size: 2, batch_per: rank, val_size: 64, train_size: 1400}
trainer: {max_epochs: 3}
"""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """A training whose batch grows with the devices."""
    experiment = (
        Experiment()
        .replace("model", net="basicnet", lr_scale="linear", optimizer="adam", schedule="constant")
        .replace("data", batch_size=8, batch_per="rank", val_size=0)
        .replace("trainer", max_epochs=20)
    )
    return Recipe(experiment, None, 1464, 2000)


def test_a_training_has_the_steps_of_its_batches(recipe: Recipe) -> None:
    # 183 batches of 8 an epoch, 45 of 32, and 22 of 64.
    assert [recipe.plan(count).total_steps for count in (1, 4, 8)] == [3660, 900, 440]
    together = replace(recipe, experiment=recipe.experiment.replace("data", batch_per="global"))
    assert [together.plan(count).total_steps for count in (1, 4, 8)] == [3660] * 3


@pytest.mark.parametrize(("gpus", "several"), [(0, (2,)), (1, ()), (2, (2,)), (3, (2,)), (4, (4,)), (8, (4, 8))])
def test_the_devices_of_this_machine_are_measured(recipe: Recipe, gpus: int, several: tuple[int, ...]) -> None:
    found = Devices("cuda", tuple(range(gpus))) if gpus else Devices("cpu", (0,))
    engines = (RAW_DDP, DATA_PARALLEL, SERVER)
    pairs = [(SINGLE, 1), *((engine, count) for count in several for engine in engines)]
    assert Stage(recipe, found, 4).pairs() == pairs


def test_an_engine_that_cannot_train_it_is_left_out_with_its_own_reason(recipe: Recipe) -> None:
    stage = Stage(recipe, Devices("cpu", (0,)), 4)
    assert stage.refusal(SINGLE, 1) is None
    assert stage.refusal(RAW_DDP, 2) is None
    assert "no GPU" in str(stage.refusal(DATA_PARALLEL, 2))
    gpus = replace(stage, devices=Devices("cuda", tuple(range(8))))
    assert gpus.refusal(DATA_PARALLEL, 8) is None
    # 16-mixed is what auto is there.
    assert "float16" in str(gpus.refusal(SERVER, 8))
    few = replace(stage, recipe=replace(recipe, timed_count=10))
    assert "16 is more than the 10" in str(few.refusal(RAW_DDP, 2))


def test_ranks_that_would_not_fit_into_the_memory_are_not_started(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_of(Stage(recipe, Devices("cpu", (0,)), 4))
    alone = {name_of(SINGLE, 1): [{"step_ms": 1.0, "memory_bytes": 500.0}]}
    ddp = next(each for each in topic.measurements if each.name == name_of(RAW_DDP, 2))
    assert ddp.unless is not None
    for free, fits in ((999, False), (1001, True)):
        monkeypatch.setattr("benchmarks.devices.free_memory", lambda free=free: free)
        assert (ddp.unless(alone) is None) is fits


def test_what_stands_in_the_way_of_one_leaves_the_others_measured(tmp_path: Path) -> None:
    seen: list[int] = []

    def take(folder: Path) -> Numbers:
        return {"seconds": 2.0}

    def unless(rows: Any) -> str | None:
        seen.append(len(rows["a"]))
        return "There is no room."

    topic = Topic(
        "speed",
        "Speed",
        [
            Measurement("a", take, "seconds"),
            Measurement("b", take, "seconds", unless),
            Measurement("c", take, "seconds"),
        ],
        [Ratio("a", "b"), Ratio("a", "c")],
    )
    said: list[str] = []
    found = run_rounds(topic, 2, tmp_path, said.append)
    assert [row["name"] for row in found["rows"]] == ["a", "c"]
    assert [(ratio["of"], ratio["to"]) for ratio in found["ratios"]] == [("a", "c")]
    assert found["left_out"] == [{"name": "b", "reason": "There is no room."}]
    assert seen == [1]
    assert "speed: b is left out. There is no room." in said
    bench = {"machine": {"processor": "one", "cores": 2}, "repeats": 2, "topics": {"speed": found}, "versions": {}}
    write_bench(tmp_path / "bench.html", bench)
    for told in (text(bench), Page((tmp_path / "bench.html").read_text()).text):
        assert "Not measured: b. There is no room." in told


def test_the_timed_runs_train_the_experiment_for_a_few_steps(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    recipe = Recipe.read(tmp_path / "tiny.yaml")
    assert (recipe.train_count, recipe.timed_count) == (1400, 60_000)
    timed = recipe.timed(6, "cpu")
    assert (timed.trainer.max_steps, timed.data.val_size, timed.data.batch_per) == (6, 0, "rank")
    assert not list(recipe.notes())


def test_the_default_experiment_needs_no_file() -> None:
    topic = devices(steps=40)
    assert [each.name for each in topic.measurements][:2] == ["single, 1 device", "raw_ddp, 2 ranks"]
    assert any("Of the 40 steps of a run the first 20 are left out" in note for note in topic.notes)


def made_topic(recipe: Recipe, step_ms: dict[str, list[float]]) -> dict[str, Any]:
    """Returns what `bench.json` would have of steps that take so long."""
    stage = Stage(recipe, Devices("cpu", (0,)), 4)
    rows = {name_of(*pair): [{"step_ms": each} for each in step_ms.get(pair[0], [])] for pair in stage.pairs()}
    return dict(json.loads(json.dumps(analyse(stage, rows))))


def test_what_other_programs_take_of_the_cores_is_noticed(
    topic: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds busy, seconds of all cores, seconds of our own that are waited for.
    times = iter([(10.0, 40.0, 2.0), (16.0, 48.0, 5.0)])
    with monkeypatch.context() as patched:
        patched.setattr(stage, "_cpu_times", lambda: next(times))
        assert Elsewhere().share() == {"elsewhere": pytest.approx(3 / 8)}
    spin = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
    before = stage._cpu_times()
    run_python("-c", spin, folder=tmp_path)
    after = stage._cpu_times()
    assert before
    assert after
    assert after[2] - before[2] >= 1
    assert after[0] - before[0] >= 0.9
    assert "Other programs" not in bench_page(tmp_path, topic).text
    busy = {"devices": topic["devices"] | {"elsewhere": 0.756}}
    assert "Other programs used up to 76" in bench_page(tmp_path, busy).text


@pytest.fixture(scope="module")
def topic(recipe: Recipe) -> dict[str, Any]:
    return made_topic(recipe, {SINGLE: [400.0, 600.0, 500.0], RAW_DDP: [1000.0, 500.0, 1000.0]})


def test_a_time_is_the_steps_times_the_median_step_and_a_speed_up_a_round_s(topic: dict[str, Any]) -> None:
    single, ddp = topic["devices"]["measured"]
    assert (single["engine"], single["devices"], single["steps"], single["batch_size"]) == (SINGLE, 1, 3660, 8)
    assert single["seconds"] == pytest.approx({"median": 1830, "lowest": 1464, "highest": 2196})
    assert (ddp["engine"], ddp["devices"], ddp["steps"], ddp["batch_size"]) == (RAW_DDP, 2, 1820, 16)
    assert ddp["seconds"] == pytest.approx({"median": 1820, "lowest": 910, "highest": 1820})
    ratios = [1464 / 1820, 2196 / 910, 1830 / 1820]
    assert ddp["speed_up"] == pytest.approx({"median": ratios[2], "lowest": ratios[0], "highest": ratios[1]})
    assert (single["shares_cores"], ddp["shares_cores"]) == (False, True)


def test_the_page_shows_what_was_measured(topic: dict[str, Any], tmp_path: Path) -> None:
    shown = bench_page(tmp_path, topic).text.replace(SPACE, " ")
    assert "30 min 30 s" in shown
    for words in ("basicnet", "shared cores"):
        assert words in shown
    assert "20 epochs of 1,464 samples of mnist" in shown


def test_the_section_escapes_what_it_is_given(topic: dict[str, Any], tmp_path: Path) -> None:
    hostile = json.loads(re.sub(r'"(raw_ddp|mnist|basicnet)"', '"<script>\\\\"\\1\'&"', json.dumps(topic)))
    page = bench_page(tmp_path, hostile)
    assert "<script>" in page.text
    assert "<script>" not in page.content


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config", "no.yaml"), "no.yaml cannot be read"),
        (("--config", "wrong.yaml"), "model.nett"),
        (("--config", "callbacks.yaml"), "trainer.callbacks"),
        (("--config", "user.yaml"), "names a class for model"),
        (("--config", "right.yaml", "--config", "wrong.yaml"), "--config is given 2 times"),
        (("--config", "right.yaml", "--topics", "start"), "--config is for the topic devices alone"),
        (("--config", "right.yaml", "--topics", "devices,start"), "--config is for the topic devices alone"),
        (("--config", "right.yaml", "--steps", "3"), "--steps must be at least 4"),
        (("--steps", "9", "--topics", "start"), "--steps is for the topic devices"),
        (("--config", "right.yaml", "--set", "x"), "--set"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is_measured(
    program: Program, words: tuple[str, ...], message: str
) -> None:
    callback = "{class_path: lightning.pytorch.callbacks.RichModelSummary}"
    files = {
        "right": TINY,
        "wrong": TINY.replace("net:", "nett:"),
        "user": "model: {class_path: torch.nn.Linear}\n",
        "callbacks": TINY.replace("max_epochs: 3", f"max_epochs: 3, callbacks: [{callback}]"),
    }
    for name, content in files.items():
        (program.folder / f"{name}.yaml").write_text(content)
    done = program(*words, engine="benchmarks")
    assert done.code == 2, done.out + done.err
    assert done.err.startswith("error: ")
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (program.folder / "runs").exists()


@pytest.mark.slow
def test_a_training_is_timed_from_the_command_line_to_the_page(program: Program) -> None:
    (program.folder / "tiny.yaml").write_text(TINY)
    words = ("--config", "tiny.yaml", "--steps", 4, "--repeats", 1, "--run-dir", "bench")
    done = program(*words, timeout=200, engine="benchmarks")
    assert done.code == 0, done.out + done.err
    found = json.loads((program.folder / "bench" / "bench.json").read_text())
    (topic,) = found["topics"].values()
    times = topic["devices"]
    rows = {row["name"]: row["median"] / 1000 for row in topic["rows"]}
    assert list(rows) == ["single, 1 device", "raw_ddp, 2 ranks", "parameter_server, 2 ranks"]
    # 700 batches of 2, or 350 of 4, in each of 3 epochs.
    steps = [2100, 1050, 1050]
    assert [row["steps"] for row in times["measured"]] == steps
    seconds = [count * step for count, step in zip(steps, rows.values(), strict=True)]
    assert [row["seconds"]["median"] for row in times["measured"]] == pytest.approx(seconds)
    assert [row["speed_up"]["median"] for row in times["measured"]] == pytest.approx([seconds[0] / s for s in seconds])
    assert [each["name"] for each in topic["left_out"]] == ["data_parallel, 2 devices"]
    page = Page((program.folder / "bench" / "bench.html").read_text()).text
    for told in (done.out, page):
        plain = " ".join(told.split())
        assert "Not measured: data_parallel, 2 devices." in plain
