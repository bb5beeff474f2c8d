"""Hooks of mkdocs for the navigation, the links to the repository, and tables on narrow screens."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from ddp_doctor.checks import describe

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
CHECKS = "Checks of the doctor"
# A table with a longer cell is shown row by row on a narrow screen.
LONGEST_CELL = 60
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")


def on_config(config: Any) -> Any:
    """Adds the page of each check to the navigation, and the addresses of the site and the repository if set."""
    pages = next(found for entry in config.nav for found in _lists_named(entry, CHECKS))
    pages.extend({f"{check.code} {check.title}": f"checks/{check.code}.md"} for check in describe().values())
    addresses = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"]
    if site := addresses.get("Documentation"):
        config.site_url = site.rstrip("/") + "/"
    if address := (os.environ.get("LIT_MNIST_REPOSITORY") or addresses.get("Repository", "")).rstrip("/"):
        config.repo_url, config.repo_name = address, "/".join(address.split("/")[-2:])
        config.edit_uri = "edit/main/docs/"
        config.theme["features"].append("content.action.edit")
    return config


def _lists_named(entry: Any, name: str) -> list[Any]:
    if not isinstance(entry, dict):
        return []
    below = [
        found
        for value in entry.values()
        if isinstance(value, list)
        for each in value
        for found in _lists_named(each, name)
    ]
    return [*([entry[name]] if name in entry else []), *below]


def on_page_content(html: str, **_: Any) -> str:
    """Gives each cell of a wide table the heading of its column, which site.css shows on a narrow screen."""
    return TABLE.sub(lambda match: labeled(match[0]), html)


def labeled(table: str) -> str:
    """Returns a table whose cells name their columns, or the table itself if its cells are short."""
    headings = [TAG.sub("", text).strip() for text in HEADING.findall(table)]
    if max((len(TAG.sub("", text)) for _, text in CELL.findall(table)), default=0) <= LONGEST_CELL:
        return table

    def label(row: re.Match[str]) -> str:
        names = iter(headings)
        return CELL.sub(lambda cell: f'<td{cell[1]} data-label="{next(names, "")}">{cell[2]}</td>', row[0])

    return ROW.sub(label, table).replace("<table>", "<table data-rows>", 1)
