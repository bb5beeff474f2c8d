"""What the tests of the pages share: a parsed page and the lines drawn on it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

DASH = "\u2013"
SPACE = "\u00a0"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """A parsed page: its elements with their attributes and text; `balanced` is False where a tag has no partner."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.content, self.open, self.balanced = content, [], True
        self.elements: list[dict[str, Any]] = []
        self.feed(content)
        self.close()
        self.balanced = self.balanced and not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {"tag": tag, "attrs": dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append({"tag": tag, "attrs": dict(attrs), "text": ""})

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1]["tag"] == tag:
            self.open.pop()
        else:
            self.balanced = False

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def find(self, tag: str, style: str | None = None) -> list[dict[str, Any]]:
        return [
            element
            for element in self.elements
            if element["tag"] == tag and (style is None or style in (element["attrs"].get("class") or "").split())
        ]

    @property
    def text(self) -> str:
        return self.find("main")[0]["text"]

    def facts(self) -> dict[str, str]:
        names, values = self.find("dt"), self.find("dd")
        assert len(names) == len(values)
        return {name["text"]: value["text"] for name, value in zip(names, values, strict=True)}


def drawn(page: Page) -> dict[str, list[tuple[float, float]]]:
    """The corners of every drawn line as shares of the image from its lower left, by the line's style."""
    lines = {}
    for element in page.find("polyline"):
        pairs = [pair.split(",") for pair in element["attrs"]["points"].split()]
        style = element["attrs"]["class"].removeprefix("line ")
        lines.setdefault(style, []).extend((float(x) / 1000, 1 - float(y) / 1000) for x, y in pairs)
    return lines
