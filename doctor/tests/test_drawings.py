"""The drawings of the page: samples of the ranks, differences, the tree of the modules, and the fix as a diff."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_support import Page
from example_report import example

from ddp_doctor.findings import Finding, Report, Verdict
from ddp_doctor.observations import Batch, Comparison
from ddp_doctor.output.drawings import WIDTH, curve_drawing, module_tree, samples_drawing
from ddp_doctor.output.fix_diff import excerpt, is_diff
from ddp_doctor.output.page import page_of

CASES = {
    "LD001": (
        "for epoch in range(2):\n    for batch in loader:  #\n        step(batch)\n",
        ["+    loader.sampler.set_epoch(epoch)"],
    ),
    "LD009": ("loss = ddp.module(x).mean()  #\n", ["-loss = ddp.module(x).mean()  #", "+loss = ddp(x).mean()  #"]),
    "LD018": (
        "clip(model.parameters(), 1.0)  #\nscaler.step(optimizer)\nscaler.update()\n",
        ["+scaler.unscale_(optimizer)"],
    ),
    "LD020": ("loss.backward()\noptimizer.step() #\nlog()\n", ["+optimizer.zero_grad()"]),
    "LD026": (
        "model.load_state_dict(state, strict=False)  #\n",
        ["-model.load_state_dict(state, strict=False)  #", "+model.load_state_dict(state)  #"],
    ),
    "LD002": (
        "loader = DataLoader(data, 8, shuffle=True)  #\n",
        [
            "-loader = DataLoader(data, 8, shuffle=True)  #",
            "+loader = DataLoader(data, 8, sampler=DistributedSampler(data))  #",
        ],
    ),
    "LD005": (
        "a, b = random_split(data, [8, 2])  #\n",
        [
            "-a, b = random_split(data, [8, 2])  #",
            "+a, b = random_split(data, [8, 2], generator=torch.Generator().manual_seed(0))  #",
        ],
    ),
    "LD022": (
        "x = F.dropout(x, 0.5,)  #\n",
        ["-x = F.dropout(x, 0.5,)  #", "+x = F.dropout(x, 0.5, training=self.training)  #"],
    ),
    "LD012": ("ddp = DDP(net, device_ids=None)  #\n", ["+net = nn.SyncBatchNorm.convert_sync_batchnorm(net)"]),
    "LD013": ("loss = mean(x)  #\n", []),
}


@pytest.mark.parametrize("code", CASES)
def test_the_fix_is_a_diff_of_the_user_s_lines(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, expected = CASES[code]
    (tmp_path / "mine.py").write_text(text)
    number = next(n for n, line in enumerate(text.splitlines(), 1) if line.endswith("#"))
    lines = excerpt(Finding(code, Verdict.FAULT, "Wrong.", place=f"mine.py:{number} in main"))
    assert [line.sign + line.text for line in lines if line.sign in "-+"] == expected
    # Without a fix, the line of the finding is marked.
    assert [line.number for line in lines if line.sign == ">"] == ([] if expected else [number])
    kept = [line.text for line in lines if line.sign != "+"]
    assert kept == text.splitlines()[:5]


def test_the_lines_of_an_excerpt_begin_at_the_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def main():\n    for x in data:\n\n        a(x)\n        b(x)\n\n        c(x)\n")
    lines = excerpt(Finding("LD013", Verdict.FAULT, "Wrong.", place="mine.py:5 in main"))
    assert [line.text for line in lines] == ["", "a(x)", "b(x)", "", "c(x)"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("LD002", "a = DataLoader(x, shuffle=True)\nb = DataLoader(y, shuffle=True)\n"),
        ("LD002", "a = DataLoader(x, **options)\n"),
        ("LD005", "a, b = random_split(\n    data, [8, 2]\n)\n"),
        ("LD012", "ddp = DDP(Net())\n"),
        ("LD020", "engine.update(loss)\n"),
        ("LD001", "for x in loader:\n    step(x)\n"),
    ],
)
def test_a_fix_that_needs_a_guess_is_not_written(
    code: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    assert not is_diff(excerpt(Finding(code, Verdict.FAULT, "Wrong.", place="mine.py:1 in main")))


@pytest.mark.parametrize("place", ["", "missing.py:1 in main", "mine.py:99 in main", "mine.py", "broken.py:1 in main"])
def test_without_its_lines_a_finding_has_no_excerpt(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("step()\n")
    (tmp_path / "broken.py").write_text("def (\n")
    assert excerpt(Finding("LD001", Verdict.FAULT, "Wrong.", place=place)) == []


def test_the_samples_of_each_rank_fit_into_the_drawing() -> None:
    batches = [
        Batch(0, 0, 0, 1000, [f"{n}00000000" for n in range(24)], ["100000000"]),
        Batch(0, 0, 1, 1, ["7"]),
        Batch(0, 0, 2, 0),
    ]
    drawing = samples_drawing(Report("a", 3, batches=batches))
    assert drawing
    assert max(cell.x + cell.width for cell in drawing.cells) <= WIDTH
    assert [cell.text for cell in drawing.cells if cell.shared] == ["10000000"]
    assert "ranks share samples" in drawing.title
    shown = len(drawing.cells) - 1
    assert f"+{1000 - shown}" in [text.text for text in drawing.texts]
    assert {"rank 0", "rank 1", "rank 2"} <= {text.text for text in drawing.texts}
    assert samples_drawing(Report("a", 2)) is None


def test_the_curve_shows_what_is_above_the_threshold() -> None:
    drawing = curve_drawing(Comparison(True, differences=(0.0, 1e-16, 2e-2, float("nan")), threshold=1e-6))
    assert drawing
    assert [point.above for point in drawing.points] == [False, False, True, True]
    heights = [point.y for point in drawing.points]
    assert heights[0] >= heights[1] > drawing.threshold.y > heights[2] > heights[3]
    assert "step 2: 2.0e-02, step 3: not finite" in drawing.title
    assert curve_drawing(Comparison(reason="it hung")) is None


def test_the_tree_marks_the_first_module_that_differs() -> None:
    names = [f"layers.{layer}.{part}" for layer in range(40) for part in ("conv", "norm")]
    modules = [(name, "Part") for name in names]
    nodes = module_tree(Comparison(True, module="layers.20.norm", modules=modules))
    (first,) = [n for n, node in enumerate(nodes) if node.state == "first"]
    assert (nodes[first].name, nodes[first].depth) == ("norm", 2)
    assert [node.state for node in nodes[first - 2 : first + 3]] == ["", "equal", "first", "", "later"]
    assert (nodes[0].name, len(nodes) < 45) == ("layers", True)
    assert module_tree(Comparison(True, modules=modules)) == []


def test_a_page_without_observations_has_no_drawing() -> None:
    page = Page(page_of(replace(example(), batches=[], comparison=None)))
    assert page.balanced
    assert not page.find("svg")
    drawn = Page(page_of(example())).find("svg")
    assert len(drawn) == 2
