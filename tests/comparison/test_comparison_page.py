"""The page and the text of a comparison: which engines agree, what each costs, and nothing that was not measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparison_page import (
    absent,
    cells,
    close,
    different,
    headline,
    lines,
    make_comparison,
    make_engine,
    write,
)
from html_page import DASH, SPACE, drawn

from lit_mnist.comparison.summary import text as text_of


def test_needs_nothing_outside_itself(tmp_path: Path) -> None:
    page = write(tmp_path, make_comparison(make_engine("lightning"), different()))
    assert not re.search(r"https?:|url\(|@import|<script", page.content)
    addresses = [e["attrs"][name] for e in page.elements for name in ("src", "href") if name in e["attrs"]]
    assert addresses == ["data:,"]
    policy = next(e["attrs"]["content"] for e in page.find("meta") if "http-equiv" in e["attrs"])
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.html"]


def test_the_headline_says_that_all_are_equal(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning"), make_engine("fabric"), absent("hf", "skipped", "no module"))
    page = write(tmp_path, comparison)
    assert headline(page) == "3 of 3 engines trained bit-identical weights"
    assert page.find("title")[0]["text"] == headline(page)
    assert [e["text"] for e in page.find("p", "lead")] == ["1 skipped"]
    assert [line for line in lines(comparison) if line][:2] == [headline(page), "1 skipped"]
    ran = page.find("p", "summary")[0]["text"]
    for part in (f"2{SPACE}ranks", "cpu", "32-true", f"3{SPACE}steps", "compared with raw_ddp (own launcher)"):
        assert part in ran


@pytest.mark.parametrize(
    ("others", "expected", "apart"),
    [
        ([different()], "1 of 2 engines differs", []),
        ([different("a"), different("b"), close()], "2 of 4 engines differ", ["1 bit-identical, 1 as close"]),
        ([close(), make_engine("fabric")], "3 of 3 engines agree as closely as expected", ["2 bit-identical, 1 as"]),
        ([], "1 of 1 engines ran, and nothing was compared", []),
        (
            [make_engine("a"), absent("b", "failed", "lost")],
            "2 of 2 engines agree, but not every engine finished",
            ["1 failed"],
        ),
    ],
)
def test_the_headline_counts(tmp_path: Path, others: list[dict[str, Any]], expected: str, apart: list[str]) -> None:
    page = write(tmp_path, make_comparison(*others))
    assert headline(page) == expected
    notes = [e["text"] for e in page.find("p", "lead")]
    assert [note.startswith(part) for note, part in zip(notes, apart, strict=True)] == [True] * len(apart)


def test_never_claims_success_for_what_did_not_pass(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning"), absent("fabric", "failed", "rank 1 was lost"))
    page = write(tmp_path, comparison | {"equal": False})
    assert "not every engine finished" in headline(page)
    assert page.find("h1", "bad")
    comparison["engines"][1] = absent("lightning", "failed", "rank 0 was lost")
    assert headline(write(tmp_path, comparison)) == "1 of 3 engines ran, and nothing was compared"


def test_every_check_has_a_mark_and_words(tmp_path: Path) -> None:
    wrong = different() | {"comparison": different()["comparison"] | {"samples": False, "learning_rate": False}}
    rows = cells(write(tmp_path, make_comparison(make_engine("lightning"), close(), wrong)), "Equality")
    assert list(rows) == ["raw_ddp (own launcher)", "lightning", "single", "parameter_server"]
    assert [(row["Expected"], row["Samples"]) for row in rows.values()] == [
        ("reference", f"{DASH} not compared"),
        ("✓ bits met", "✓ identical"),
        ("✓ 1e-05 relative met", "✓ identical"),
        ("✗ rounding not met", "≠ differs"),
    ]
    nearly = "≈ not identical, as expected"
    assert [rows["single"][name] for name in ("Loss", "Weights", "Test")] == [nearly, nearly, "✓ identical"]
    assert rows["parameter_server"]["Test"] == f"{DASH} not compared"
    far = [row["Largest difference in weights"] for row in rows.values()]
    assert far == [DASH, "0", "3.1e-7", "(0.013) not checked"]
    assert [rows[name]["Weights SHA-256"] for name in rows] == ["01234567"] * 3 + ["ranks differ"]
    assert [rows[name]["Ranks"] for name in rows] == ["2", "2", "1", "2"]


def test_other_samples_are_never_close_enough(tmp_path: Path) -> None:
    rows = cells(write(tmp_path, make_comparison(make_engine("fabric", samples=False))), "Equality")
    assert rows["fabric"]["Samples"] == "≠ differs"


def test_the_first_difference_is_described(tmp_path: Path) -> None:
    comparison = make_comparison(different(), make_engine("fabric"))
    items = [e["text"] for e in write(tmp_path, comparison).find("li")]
    assert items == ["parameter_serverstep 7: fc.weight"]
    assert any(re.fullmatch(r"parameter_server +step 7: fc.weight", line) for line in lines(comparison))
    assert not write(tmp_path, make_comparison(make_engine("lightning"))).find("li")


def test_engines_with_the_same_losses_share_a_line(tmp_path: Path) -> None:
    page = write(tmp_path, make_comparison(make_engine("lightning"), close(), different(), make_engine("fabric")))
    legend = [e["text"] for e in page.find("span", "key")]
    assert [key.rsplit(" ", 1)[0] for key in legend] == [
        "raw_ddp (own launcher), lightning, fabric",
        "single",  # differs in one bit of the last step
        "parameter_server",
    ]
    assert [len(line) for line in drawn(page).values()] == [3, 3, 3]
    nothing = make_comparison()
    nothing["engines"][0]["loss"] = [float("nan")]
    assert "No losses were logged." in write(tmp_path, nothing).text


def test_the_cost_is_given_with_its_spread_and_as_a_ratio(tmp_path: Path) -> None:
    page = write(tmp_path, make_comparison(make_engine("lightning", speed=800.0), make_engine("fabric", speed=1600.0)))
    rows = cells(page, "Cost")
    assert list(rows["lightning"].values()) == [
        "800.0400.0 to 1,600",
        "0.80",
        f"8.0{SPACE}s4.0{SPACE}s to 16.0{SPACE}s",
        f"512.0{SPACE}MiB256.0{SPACE}MiB to 1.0{SPACE}GiB",
        f"2.0{SPACE}KiB",
        f"1.0{SPACE}KiB",
        f"4allreduce{SPACE}3, broadcast{SPACE}1",
        "96",
    ]
    assert [row["Ratio to raw_ddp (own launcher)"] for row in rows.values()] == ["1.00", "0.80", "1.60"]
    bars = [e["attrs"]["style"] for e in page.find("i") if "width" in e["attrs"].get("style", "")]
    assert bars == ["width:62.5%", "width:50.0%", "width:100.0%"]
    assert "Medians of 5 runs, with their range; the speed excludes the first 20 steps." in page.text


def test_a_ratio_states_a_different_number_of_ranks(tmp_path: Path) -> None:
    rows = cells(write(tmp_path, make_comparison(make_engine("lightning"), close("single"))), "Cost")
    assert [row["Ratio to raw_ddp (own launcher)"] for row in rows.values()] == ["1.00", "1.00", f"1.00on 1{SPACE}rank"]


def test_missing_timings_are_dashes(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning"), make_engine("fabric"))
    comparison["engines"][0]["cost"] |= dict.fromkeys(TIMED)
    comparison["engines"][1]["cost"]["images_per_s"] = None
    rows = cells(write(tmp_path, comparison), "Cost")
    assert {rows["raw_ddp (own launcher)"][name] for name in ("Images per second", "Peak memory")} == {DASH}
    assert (rows["lightning"]["Images per second"], rows["lightning"]["Lines of code"]) == (DASH, "96")
    assert "Ratio to raw_ddp (own launcher)" not in rows["fabric"]  # there is nothing to divide by


TIMED = ("images_per_s", "seconds_to_first_step", "peak_memory_bytes")


def test_columns_without_values_are_left_out(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning")) | {"repeats": 0}
    for engine in comparison["engines"]:
        engine["cost"] |= dict.fromkeys(TIMED)
    page = write(tmp_path, comparison)
    heads = ["Sent per step", "Payload per step", "Calls per step", "Lines of code"]
    assert list(cells(page, "Cost")["lightning"]) == heads
    assert "Nothing was timed." in page.text
    assert "Medians" not in page.text
    assert not page.find("span", "meter")
    text = lines(comparison)
    start = text.index("Cost: nothing was timed")
    assert text[start + 1].split() == ["engine", "sent/step", "payload", "calls", "lines"]
    assert not any(line.startswith("Cost: medians") for line in text)


def test_a_single_timed_run_is_not_called_a_median(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning")) | {"repeats": 1}
    for engine in comparison["engines"]:
        engine["cost"] |= {name: dict.fromkeys(("median", "lowest", "highest"), 7.0) for name in TIMED}
    page = write(tmp_path, comparison)
    assert "One timed run of each engine; the speed excludes the first 20 steps." in page.text
    assert not any(" from to " in line for line in lines(comparison))


def test_the_captions_say_what_is_counted(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning"))
    page, text = write(tmp_path, comparison).text, " ".join(" ".join(lines(comparison)).split())
    for name, words in (
        (
            "Sent",
            "bytes that the busiest rank sent to the others, by the TCP counters of the kernel and of batch norm",
        ),
        ("Payload", "bytes passed to collectives, sends and the exchange of batch norm"),
        ("Calls", "collectives, sends, receives and exchanges per step"),
    ):
        assert f"{name} {words}" in page
        assert f"{name.lower()} {words}" in text


def test_no_collective_is_a_count_too(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("single"))
    comparison["engines"][1]["cost"] |= {"collectives_per_step": {}, "bytes_sent_per_step": 0}
    row = cells(write(tmp_path, comparison), "Cost")["single"]
    assert (row["Calls per step"], row["Sent per step"]) == ("0", "0 B".replace(" ", SPACE))


def test_reads_what_the_command_writes(tmp_path: Path) -> None:
    """The reference has no comparison; on another number of ranks the weights may be anywhere."""
    checks = {"loss": False, "weights": False, "test": False, "largest_difference": 31.7373046875}
    comparison = make_comparison(make_engine("lightning"), make_engine("single", expected="rounding", **checks))
    comparison["reference"] = "raw_ddp (own launcher)"
    comparison["engines"][0]["comparison"] = None
    page = write(tmp_path, comparison)
    rows = cells(page, "Equality")
    assert headline(page) == "3 of 3 engines agree as closely as expected"
    assert rows["raw_ddp (own launcher)"]["Expected"] == "reference"
    assert rows["single"]["Largest difference in weights"] == "(32) not checked"
    assert not page.find("td", "bad")
    assert list(cells(page, "Cost")["lightning"])[1] == "Ratio to raw_ddp (own launcher)"
    assert "rounding on another number of ranks" in page.text
    assert "1e-05 relative" not in page.text  # nobody is held to it
    text = lines(comparison)
    assert next(line.split()[-2] for line in text if line.startswith("single ")) == "(32)"
    assert any(re.match("rounding +on another number of ranks", line) for line in text)


def test_skipped_and_failed_engines_say_why(tmp_path: Path) -> None:
    install = "pip install 'lit_mnist[engines]'"
    skipped = absent("with_accelerate", "skipped", f"accelerate is missing: {install}", install)
    comparison = make_comparison(skipped, absent("fabric", "failed", "rank 1 was lost"))
    page = write(tmp_path, comparison)
    expected = [f"with_accelerateskipped: accelerate is missing{install}", "fabricfailed: rank 1 was lost"]
    assert [e["text"] for e in page.find("li")] == expected
    assert install in [e["text"] for e in page.find("code")]
    rows = cells(page, "Equality")
    assert (rows["with_accelerate"]["Expected"], rows["fabric"]["Expected"]) == ("skipped", "✗ failed")
    assert list(cells(page, "Cost")) == ["raw_ddp (own launcher)"]
    text = text_of(comparison, width=100, color=False)
    for part in ("skipped: accelerate is missing", install, "failed: rank 1 was lost"):
        assert part in text


def test_everything_skipped_is_no_success(tmp_path: Path) -> None:
    comparison = make_comparison() | {"engines": [absent(name, "skipped", "no ranks") for name in ("raw_ddp", "b")]}
    page = write(tmp_path, comparison)
    assert headline(page) == "0 of 2 engines ran"
    assert "No engine ran." in page.text
    assert lines(comparison)[:2] == ["0 of 2 engines ran", "2 skipped"]


def test_contains_the_facts_and_the_configuration(tmp_path: Path) -> None:
    comparison = make_comparison(make_engine("lightning"))
    page = write(tmp_path, comparison)
    assert page.facts() == {
        **{
            "Reference": "raw_ddp (own launcher)",
            "Device": "cpu",
            "Precision": "32-true",
            "Ranks": "2",
            "Threads per rank": "1",
        },
        **{"Steps compared": "3", "Timing repeats": "5", "Warm-up steps": "20", "torch": "2.99.1+cpu"},
        **{"Command": "train.py compare --devices 2", "Commit": "c0ffee" * 6},
        **{"Data": "mnist", "Data source": "embedded", "Data SHA-256": "d" * 64},
    }
    assert yaml.safe_load("".join(e["text"] for e in page.find("pre"))) == comparison["experiment"]


BAD = '</style></table><script>alert(1)</script><img src=x onerror="a">[bold]\'&\x1b[2J\udcff{}'


def poison(value: Any) -> Any:
    """The same structure with hostile text in each of its texts but `status`, which the project writes."""
    if isinstance(value, dict):
        return {key: item if key == "status" else poison(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return value + BAD if isinstance(value, str) else value


def test_escapes_hostile_strings(tmp_path: Path) -> None:
    comparison = make_comparison(different(), absent("fabric", "failed", "lost", "pip install"))
    hostile = poison(comparison)
    hostile["versions"] = {BAD: BAD}
    hostile["experiment"][BAD] = [BAD]
    page, clean = write(tmp_path, hostile), write(tmp_path, comparison)
    assert {e["tag"] for e in page.elements} == {e["tag"] for e in clean.elements}
    assert not any(name.startswith("on") for e in page.elements for name in e["attrs"])
    assert "\x1b" not in page.content
    assert list(cells(page, "Equality"))[1].count("<script>") == 1
    text = text_of(hostile, width=100, color=False)
    assert "\x1b" not in text
    assert text.encode("utf-8")
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [100, 110, 120])
def test_the_tables_fit_the_terminal(width: int) -> None:
    variants = ("torchrun", "spawn", "accelerate launch")
    names = ("lightning", "single", "data_parallel", "fabric", "with_accelerate", "with_hf_trainer", "a_b")
    engines = [make_engine("raw_ddp", variant=variant) for variant in variants] + [make_engine(n) for n in names]
    text = lines(make_comparison(*engines, different(), close("twelfth")), width)
    assert max(map(len, text)) <= width
    assert not any("…" in line for line in text)
    for name in (*names, "parameter_server", "twelfth"):
        assert sum(line.startswith(f"{name} ") and "96" in line for line in text) == 1  # its row of the cost
        assert sum(bool(re.match(rf"{name} +[12] +[✓✗] ", line)) for line in text) == 1  # and of the checks
    assert sum(line.startswith("raw_ddp ") for line in text) == 8
    row = next(" ".join(line.split()) for line in text if line.startswith("fabric ") and "KiB" in line)
    assert row == "fabric 1,000 500.0 to 2,000 1.00 8.0 s 512.0 MiB 2.0 KiB 1.0 KiB 4 96"


def test_color_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = make_comparison(different())
    assert "\x1b" not in text_of(comparison)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = text_of(comparison, width=100, color=True)
    assert "\x1b[1;31m1 of 2 engines differs" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == lines(comparison, 100)


def test_accepts_the_comparison_read_from_its_file(tmp_path: Path) -> None:
    comparison = make_comparison(different(), close())
    first = write(tmp_path, comparison).content
    assert write(tmp_path, json.loads(json.dumps(comparison))).content == first


def test_imports_neither_lightning_nor_torch() -> None:
    code = "import sys, lit_mnist.comparison.summary; print({'torch', 'lightning', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
