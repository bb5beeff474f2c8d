"""Hooks of mkdocs: a page for each check of the doctor, and links that lead out of `docs/`.

A link to the file of a check leads to its page. The site does not contain the other files of the checkout: a link to
one becomes its text.
"""

from __future__ import annotations

import re
from typing import Any

from ddp_doctor.faults import Description, describe
from mkdocs.structure.files import File, Files

CODES = {f"../ddp_doctor/faults/{check.module}.py": code for code, check in describe().items()}
OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the checks."""
    for code, check in describe().items():
        files.append(File.generated(config, f"checks/{code}.md", content=page_of(check)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links that lead out of `docs/`."""
    if page.file.src_uri.startswith("checks/"):
        return markdown

    def point(match: re.Match[str]) -> str:
        code = CODES.get(match["target"])
        return f"[{match['text']}](../checks/{code}.md)" if code else match["text"]

    return OUTSIDE.sub(point, markdown)


def page_of(check: Description) -> str:
    """Returns the page of a check, as Markdown: what `ddp-doctor --explain` prints."""
    fix: list[str] = []
    for line in check.fix.splitlines():
        # An indented block is code, which Markdown separates by an empty line.
        if fix and line.startswith(" ") is not fix[-1].startswith(" "):
            fix.append("")
        fix.append(line)
    threads = "\n".join(f"- [{name}]({_address(name)})" for name in check.threads)
    return f"""# {check.code}: {check.title}

{check.cause}

## Wrong

```python
{check.wrong}```

## Fix

{chr(10).join(fix)}

## Reported in

{threads}

[All checks](../doctor/guide.md#the-checks)
"""


def _address(thread: str) -> str:
    """Returns the address of `owner/repository#number`."""
    name, mark, number = thread.partition("#")
    return f"https://github.com/{name}/issues/{number}" if mark and ":" not in name else thread
