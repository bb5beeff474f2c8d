"""In a browser, every page is free of errors and of overflow, its text can be read, and its images have names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import THEMES, WIDTHS, Chromium, chromium
from comparison_page import absent, close, different, make_comparison, make_engine
from comparison_page import write as write_compared
from conftest import ROOT, Program
from docs_site import shared_site
from example_report import example, hostile
from run_report import make_mistakes, make_result
from run_report import write as write_run
from voc_folder import write_voc

from benchmarks.pages.page import write_bench
from ddp_doctor.output.page import page_of

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(240)]

# With this variable the tests leave an image of every page in a folder.
SCREENSHOTS = os.environ.get("LIT_MNIST_TEST_SCREENSHOTS")
PLANTED = """<!DOCTYPE html><html lang="en"><title>Faults</title><style>
@media (prefers-color-scheme: dark) {body {background: #000; color: #fff}}
.gray {color: #999} @media (prefers-color-scheme: dark) {.gray {color: #444}}
.wide {width: 600px} svg text {fill: #888}
</style><main>%s</main>"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as opened:
        yield opened


def check(browser: Chromium, page: Path, name: str, themes: tuple[str, ...] = THEMES) -> list[str]:
    """Returns the problems of a page in each theme and at each width."""
    found = []
    for theme in themes:
        for width in WIDTHS:
            browser.open(page, theme, width)
            found += [f"{name}, {theme}, {width} px: {problem}" for problem in browser.problems()]
            if SCREENSHOTS:
                browser.screenshot(Path(SCREENSHOTS) / f"{name}-{theme}-{width}.png")
    return list(dict.fromkeys(found))


def assert_fine(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("body", "theme", "width", "found"),
    [
        ("<p>Text.", "light", 390, None),
        ("<p class=gray>Pale text.", "light", 390, "color-contrast"),
        ("<p class=gray>Dark text.", "dark", 1400, "color-contrast"),
        ("<table><td class=gray>0</table>", "light", 1400, "color-contrast"),
        ("<p class=wide>Wide.", "light", 390, "overflow"),
        ("<p class=wide>Not wide here.", "light", 1400, None),
        ("<div style='overflow:auto' tabindex=0><p class=wide>It scrolls.</div>", "light", 390, None),
        ("<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw=' width=9>", "light", 390, "image-alt"),
        ("<svg role=img></svg>", "light", 390, "svg-img-alt"),
        ("<svg role=img aria-label=Loss><text y=20>gray</text></svg>", "light", 390, "drawing"),
        ("<svg role=img aria-label=Loss><text y=20>gray</text></svg>", "dark", 390, None),
        ("<img alt=none src=missing.png>", "light", 390, "console"),
        ("<script>throw new Error('planted')</script>", "light", 390, "console"),
    ],
)
def test_a_planted_problem_is_found(
    browser: Chromium, tmp_path: Path, body: str, theme: str, width: int, found: str | None
) -> None:
    page = tmp_path / "page.html"
    page.write_text(PLANTED % body)
    browser.open(page, theme, width)
    assert {problem.partition(":")[0] for problem in browser.problems()} == ({found} if found else set())


@pytest.mark.parametrize(
    "task", ["digits", *(pytest.param(task, marks=pytest.mark.slow) for task in ("segmentation", "user module"))]
)
def test_the_report_of_a_run(browser: Chromium, program: Program, tmp_path: Path, task: str) -> None:
    flags: dict[str, tuple[object, ...]] = {
        "digits": ("--max-steps", 40),
        "segmentation": (
            *("--config", ROOT / "examples" / "segmentation" / "shapes.yaml", "--import", "segmentation"),
            *("--data.name", "voc2012", "--model.num_classes", 21, "--data.root", write_voc(tmp_path)),
            *("--data.val_size", 4, "--data.image_size", 32, "--data.batch_size", 4, "--max-steps", 6),
        ),
        "user module": ("--config", "spirals.yaml", "--import", "spirals"),
    }
    for name in ("spirals", "spirals.yaml"):
        (program.folder / name).symlink_to(ROOT / "examples" / "user_module" / name)
    folder = program.train(*flags[task], "--devices", 2)
    assert_fine(check(browser, folder / "report.html", f"report of {task}"))


@pytest.mark.slow
def test_the_report_of_a_run_with_many_classes(browser: Chromium, tmp_path: Path) -> None:
    names = [f"a long name of class {number}" for number in range(20)]
    write_run(tmp_path, result=make_result(20), mistakes=make_mistakes(30, 20), class_names=names)
    assert_fine(check(browser, tmp_path / "report.html", "report of 20 classes"))


def test_the_comparison_of_engines(browser: Chromium, tmp_path: Path) -> None:
    others = (
        make_engine("lightning"),
        close(),
        different(),
        absent("horovod", "skipped", "horovod is not installed.", "pip install horovod"),
        absent("fabric", "failed", "Rank 1 ended with exit code 3. " * 5),
    )
    write_compared(tmp_path, make_comparison(*others))
    assert_fine(check(browser, tmp_path / "comparison.html", "comparison"))


@pytest.mark.parametrize("content", ["example", "hostile"])
def test_the_report_of_the_doctor(browser: Chromium, tmp_path: Path, content: str) -> None:
    report = example() if content == "example" else hostile()
    (tmp_path / "doctor.html").write_text(page_of(report), encoding="utf-8")
    assert_fine(check(browser, tmp_path / "doctor.html", f"doctor {content}"))


@pytest.mark.slow
def test_the_benchmark(browser: Chromium, tmp_path: Path) -> None:
    write_bench(tmp_path / "bench.html", json.loads((ROOT / "docs" / "bench" / "two-cores.json").read_text()))
    assert_fine(check(browser, tmp_path / "bench.html", "benchmark"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_site(tmp_path_factory)


def pages_of(site: Path) -> list[Path]:
    # The page of a wrong address is for a web server: it names its files from the server's root.
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "tutorial/05-evaluation", "promises", "api/lit_mnist"])
def test_a_page_of_the_documentation(browser: Chromium, site: Path, name: str) -> None:
    assert_fine(check(browser, site / f"{name}.html", f"docs {name.replace('/', ' ')}"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("theme", THEMES)
def test_the_documentation(browser: Chromium, site: Path, theme: str) -> None:
    pages = pages_of(site)
    assert len(pages) > 30
    names = [" ".join(page.relative_to(site).with_suffix("").parts) for page in pages]
    found = [check(browser, page, f"docs {name}", (theme,)) for page, name in zip(pages, names, strict=True)]
    assert_fine([problem for problems in found for problem in problems])


@pytest.mark.slow
def test_the_search_works_in_pages_of_a_folder(browser: Chromium, site: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(site / "tutorial" / "05-evaluation.html", "light", 1400)
    field = browser.driver.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys("GradScaler")
    results = WebDriverWait(browser.driver, 30).until(
        lambda driver: [
            link.get_attribute("href") for link in driver.find_elements("css selector", ".md-search-result__item a")
        ]
    )
    assert any("semantics.html" in address or "07-precision.html" in address for address in results)
    loaded = browser.driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(address.startswith("file:") for address in loaded)


def test_a_table_of_long_texts_needs_no_scrolling_on_a_phone(browser: Chromium, site: Path) -> None:
    browser.open(site / "promises.html", "light", 390)
    ends = "[...document.querySelectorAll('.md-typeset td')].map(cell => cell.getBoundingClientRect().right)"
    widest = f"return Math.max(...{ends})"
    assert browser.driver.execute_script(widest) <= 390
    label = "return getComputedStyle(document.querySelector('.md-typeset td:nth-child(2)'), '::before').content"
    assert "measured here" in browser.driver.execute_script(label)
