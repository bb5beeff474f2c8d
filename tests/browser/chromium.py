"""Headless Chromium, and what it finds wrong with a page."""

from __future__ import annotations

import base64
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The names of the two programs: Debian's, and those of Google's own packages.
BROWSERS, DRIVERS = ("chromium", "google-chrome"), ("chromedriver",)
THEMES, WIDTHS = ("light", "dark"), (390, 1400)

# What extends beyond the page's right edge, apart from parts of a box that scrolls.
OVERFLOW = """
const width = document.documentElement.clientWidth, wide = [];
const total = document.documentElement.scrollWidth;
if (total > width) wide.push(`the page has ${total} px`);
const clipped = (node) => {
  for (let e = node.parentElement; e && e !== document.body; e = e.parentElement)
    if (getComputedStyle(e).overflowX !== "visible") return true;
  return false;
};
const range = document.createRange();
const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
while (nodes.nextNode()) {
  const node = nodes.currentNode, text = node.nodeType === Node.TEXT_NODE;
  const element = text ? node.parentElement : node;
  range.selectNode(node);
  const box = (text ? range : element).getBoundingClientRect();
  if (box.width && box.height && box.right > width + 1 && element.checkVisibility() && !clipped(node))
    wide.push(`${element.outerHTML.slice(0, 80)} ends at ${Math.round(box.right)} px`);
}
return wide;
"""

# axe does not know that the color of an SVG's text is its fill.
SVG_CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const background = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const color = parse(getComputedStyle(e).backgroundColor);
    if (color.length && (color.length === 3 || color[3] === 1)) return color;
  }
  return [255, 255, 255];
};
const weak = [];
for (const text of document.querySelectorAll("svg text")) {
  const [a, b] = [luminance(parse(getComputedStyle(text).fill)), luminance(background(text))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (!(contrast >= 4.5)) weak.push(`"${text.textContent.trim()}": contrast ${contrast.toFixed(2)}`);
}
return weak;
"""

# axe's defaults leave out texts of one character, as in a matrix, and ask less of large text.
CONTRAST = {"ignoreLength": True, "boldValue": 700, "boldTextPt": 14, "largeTextPt": 18, "shadowOutlineEmMax": 0.1}
CONTRAST |= {"contrastRatio": {size: {"expected": 4.5} for size in ("normal", "large")}, "pseudoSizeThreshold": 0.25}
AXE = {
    "runOnly": ["wcag2a", "wcag2aa"],
    "resultTypes": ["violations"],
    "checks": {"color-contrast": {"options": CONTRAST}},
    # The Tab key takes Chromium to every box that scrolls.
    "rules": {"scrollable-region-focusable": {"enabled": False}},
}


class Chromium:
    """A browser window whose theme and width can be set.

    Args:
        driver: Selenium's driver of Chromium.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        # A site that remembers the theme of the page before would show every page in that.
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": "localStorage.clear()"})

    def open(self, page: Path, theme: str, width: int) -> None:
        """Opens a file as a reader with this theme and this window's width in CSS pixels would see it."""
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            # A color that is still fading has no contrast to measure.
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(page.as_uri())
        # On a busy machine, a page was once empty although the driver had returned.
        shown = "return document.readyState === 'complete' && location.href.startsWith(arguments[0])"
        deadline = time.monotonic() + 30
        while not self.driver.execute_script(shown, page.as_uri()):
            assert time.monotonic() < deadline, f"{page} did not load"
            time.sleep(0.05)

    def problems(self) -> list[str]:
        """Returns what is wrong with the open page: errors, overflow, and violations of WCAG 2 AA that axe finds."""
        from axe_core_python.base import AXE_SCRIPT

        found = [f"overflow: {' '.join(text.split())}" for text in self.driver.execute_script(OVERFLOW)]
        found += [f"drawing: {text}" for text in self.driver.execute_script(SVG_CONTRAST)]
        self.driver.execute_script(AXE_SCRIPT)
        checked = self.driver.execute_async_script("axe.run(arguments[0]).then(arguments[1])", AXE)
        for violation in checked["violations"]:
            for node in violation["nodes"]:
                told = " ".join(node["failureSummary"].split())
                found.append(f"{violation['id']}: {node['html'][:200]}: {told}")
        # Last, since the log gets an error some time after the page has met it.
        found += [f"console: {entry['message']}" for entry in self.driver.get_log("browser")]
        return found

    def screenshot(self, path: Path) -> None:
        """Writes an image of the whole page."""
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
        image = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(image))


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Starts Chromium without a window, and ends it with its driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = installed(BROWSERS) or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        # Chromium's sandbox does not work for root. The pages are the project's own.
        options.add_argument("--no-sandbox")
    driver = webdriver.Chrome(options, webdriver.ChromeService(installed(DRIVERS)))
    try:
        yield Chromium(driver)
    finally:
        driver.quit()


def installed(names: tuple[str, ...]) -> str | None:
    """Returns the path of the first installed program of several, or None."""
    return next((path for name in names if (path := shutil.which(name))), None)
