"""Hooks of mkdocs: the pages read well in a checkout, and the site shows the same pages with the code that they name.

- The README is the first page, and the changelog and the guide for contributors are pages.
- A link to a file outside `docs/` leads to a copy of that file in the site. An image is a link.
- A line that consists of a link such as [`run` in `train.py`](../train.py) is replaced by the code of that function or
  class, and [`run`, section `data`, in `train.py`](../train.py) by the part of it below the comment `# --- data`.
- Each check of the doctor has a page with what `ddp-doctor --explain` prints; a link to its file leads there.
"""

from __future__ import annotations

import ast
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

from ddp_doctor.checks import Description, describe

ROOT = Path(__file__).parents[1]
# Files of the checkout that are pages of the navigation.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# The folder of the site with the other files from outside `docs/`.
SOURCE = "source"
CHECKS = ROOT / "ddp_doctor" / "checks"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
CODE = re.compile(
    r"^\[`(?P<name>[\w.]+)`(?:, section `(?P<section>[^`]+)`,)? in `(?P<path>[\w/.-]+)`\]\((?P<target>[^)]+)\)$",
    re.MULTILINE,
)
FENCED = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the checks, the README, and the files outside `docs/` that a page links to."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    waiting = [file.src_uri for file in files if file.is_documentation_page()]
    files.append(File.generated(config, "checks/index.md", content=page_of_checks()))
    for check in describe().values():
        files.append(File.generated(config, f"checks/{check.code}.md", content=page_of(check)))
    while waiting:
        origin = origin_of(waiting.pop())
        for target in targets_of(origin):
            uri = uri_of(target)
            if uri is None or files.get_file_from_path(uri) is not None:
                continue
            file = File.generated(config, uri, abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
            if uri.endswith(".md"):
                waiting.append(uri)
    return files


def page_of_checks() -> str:
    """Returns the list of all checks, as Markdown."""
    rows = "\n".join(
        f"| [{check.code}]({check.code}.md) | {check.title} | {'' if check.structural else 'yes'} |"
        for check in describe().values()
    )
    return f"""# Checks of the doctor

Each page is what `ddp-doctor --explain CODE` prints. [The guide](../doctor.md) describes the verdicts and the states.

| code | finds | compares numbers |
|---|---|---|
{rows}
"""


def page_of(check: Description) -> str:
    """Returns the page of a check, as Markdown."""
    lines: list[str] = []
    for line in check.fix.splitlines():
        code = line.startswith(" ")
        if code is not bool(lines and lines[-1].startswith(" ")):
            lines.append("")
        lines.append(line)
    threads = "\n".join(f"- [{name}]({_address(name)})" for name in check.threads)
    kind = "This check reads indices, sequences and modes only" if check.structural else "This check compares numbers"
    return f"""# {check.code}: {check.title}

{check.cause}
## Wrong

```python
{check.wrong}```

## Fix

{chr(10).join(lines)}

## Reported in

{threads}

## In the report

{kind}. `ddp-doctor --explain {check.code}` prints this page, `--skip {check.code}` leaves the check out, and a comment
`# ddp-doctor: ignore[{check.code}] reason` in the reported line [accepts it](../doctor-daily.md). All checks:
[the list](index.md).
"""


def _address(thread: str) -> str:
    """Returns the address of `owner/repository#number`."""
    name, mark, number = thread.partition("#")
    return f"https://github.com/{name}/issues/{number}" if mark and ":" not in name else thread


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Shows the code that a page names, and points its links to the files of the site."""
    origin, uri = origin_of(page.file.src_uri), page.file.src_uri

    def show(match: re.Match[str]) -> str:
        path = ROOT / match["path"]
        link = posixpath.relpath(uri_of(path) or "", posixpath.dirname(uri) or ".")
        code = source_of(path, match["name"], match["section"])
        return f'```python title="{match["path"]}"\n{code}\n```\n\n<small>[The whole file]({link})</small>'

    def point(match: re.Match[str]) -> str:
        target = resolve(origin, match["target"])
        if target is None or not target.exists():
            return match[0]
        found = uri_of(target)
        if found is None:
            return match["text"]
        link = posixpath.relpath(found, posixpath.dirname(uri) or ".")
        return f"{match['image']}[{match['text']}]({link}{match['anchor'] or ''})"

    parts, end = [], 0
    for fenced in [*FENCED.finditer(markdown), None]:
        prose = markdown[end : fenced.start() if fenced else None]
        # The code is inserted after the links were changed: they are relative to the page already.
        pieces = [LINK.sub(point, piece) for piece in CODE.split(prose)[:: CODE.groups + 1]]
        shown = [show(match) for match in CODE.finditer(prose)]
        parts.append("".join(piece + code for piece, code in zip(pieces, [*shown, ""], strict=True)))
        if fenced:
            parts.append(fenced[0])
            end = fenced.end()
    return "".join(parts)


def source_of(path: Path, name: str, section: str | None = None) -> str:
    """Returns the code of a function, class or method, or of a section of it.

    Raises:
        PluginError: The file contains no such name or section.
    """
    text = path.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        if node is None:
            raise PluginError(f"{path.relative_to(ROOT)} has no {name}")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    if section is not None:
        starts = [number for number, line in enumerate(lines) if line.strip().startswith("# ---")]
        begin = next((number for number in starts if re.match(rf"# --- {section}\b", lines[number].strip())), None)
        if begin is None:
            raise PluginError(f"{name} in {path.relative_to(ROOT)} has no section {section}")
        lines = lines[begin : next((number for number in starts if number > begin), None)]
    return textwrap.dedent("\n".join(lines)).strip()


def origin_of(uri: str) -> Path:
    """Returns the file of the checkout that is a page of the site."""
    for name, page in PAGES.items():
        if uri == page:
            return ROOT / name
    return ROOT / uri.removeprefix(f"{SOURCE}/") if uri.startswith(f"{SOURCE}/") else ROOT / "docs" / uri


def uri_of(target: Path) -> str | None:
    """Returns the place of a file in the site, or None for a folder without a README."""
    if target.is_dir():
        return uri_of(target / "README.md") if (target / "README.md").exists() else None
    path = target.relative_to(ROOT).as_posix()
    if path in PAGES:
        return PAGES[path]
    if target.parent == CHECKS and target.stem in (
        codes := {check.module: check.code for check in describe().values()}
    ):
        return f"checks/{codes[target.stem]}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SOURCE}/{path}"


def resolve(origin: Path, target: str) -> Path | None:
    """Returns the file of the checkout that a link of a page leads to, or None for an address or an anchor."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    path = Path(posixpath.normpath((origin.parent / target).as_posix()))
    return path if path.is_relative_to(ROOT) else None


def targets_of(origin: Path) -> list[Path]:
    """Returns the existing files and folders that a page links to."""
    if origin.suffix != ".md":
        return []
    text = FENCED.sub("", origin.read_text(encoding="utf-8"))
    found = [resolve(origin, match["target"]) for match in LINK.finditer(text)]
    return [path for path in found if path is not None and path.exists()]
