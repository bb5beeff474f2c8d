"""Hooks of mkdocs: pages that are generated, and links that lead out of `docs/`.

The CLI reference is what the parser itself prints, and a page for each check of the doctor what `ddp-doctor --explain`
prints. Links are those of the checkout, so that they work on GitHub as well: a link to a page of the doctor or to the
file of a check leads to its page, and a link to another file that the site does not contain becomes its text.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_doctor.faults import load_checks
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
CODES = {f"doctor/{check.__name__.replace('.', '/')}.py": code for code, check in load_checks().items()}
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
HELP = {
    "Commands": ["--help"],
    "Options of the module": ["train", "--model.help"],
    "Options of the data module": ["train", "--data.help", "lit_mnist.datamodule.MNISTDataModule"],
    "Options of `train`, and of `fit`": ["train", "--help"],
    "Options of `compare`": ["compare", "--help"],
    "Options of `new`": ["new", "--help"],
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the CLI reference and the pages of the checks."""
    files.append(File.generated(config, "cli.md", content=cli_page()))
    for code, check in load_checks().items():
        files.append(File.generated(config, f"checks/{code}.md", content=page_of(code, check)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links that lead out of `docs/`."""
    place = page.file.src_uri
    if place.startswith("checks/"):
        return markdown
    # `docs/doctor` is a link to `doctor/docs`.
    folder = posixpath.dirname(
        place.replace("doctor/", "doctor/docs/", 1) if place.startswith("doctor/") else f"docs/{place}"
    )

    def point(match: re.Match[str]) -> str:
        text, anchor = match["text"], match["anchor"] or ""
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        if target in CODES:
            uri = f"checks/{CODES[target]}.md"
        elif target.startswith("doctor/docs/"):
            uri = target.replace("doctor/docs/", "doctor/", 1)
        elif target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        else:
            return text
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(place) or '.')}{anchor})"

    return LINK.sub(point, markdown)


def cli_page() -> str:
    """Returns the CLI reference, as Markdown: the help of the parser."""
    from lit_mnist import compare, new
    from lit_mnist.cli import LitCLI, expand_words

    os.environ["COLUMNS"] = "110"
    arguments, sys.argv = sys.argv, ["train.py"]
    parts = ["# CLI reference", "`python train.py` and `lit-mnist` are one command. This is what its parser prints."]
    for title, words in HELP.items():
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            program = {"compare": compare.main, "new": new.main}.get(words[0])
            program(words[1:]) if program else LitCLI(expand_words(words))
        command = " ".join(["python train.py", *words])
        # The usage repeats the names of all options.
        text = re.sub(r"^usage: .*?\n\n", "", printed.getvalue(), flags=re.DOTALL).strip().replace(" \b", "")
        parts.append(f"## {title}\n\n```text\n$ {command}\n\n{text}\n```")
    sys.argv = arguments
    return "\n\n".join(parts) + "\n"


def page_of(code: str, check: ModuleType) -> str:
    """Returns the page of a check, as Markdown: what `ddp-doctor --explain` prints."""
    fix: list[str] = []
    for line in check.FIX.splitlines():
        # An indented block is code, which Markdown separates by an empty line.
        if fix and line.startswith(" ") is not fix[-1].startswith(" "):
            fix.append("")
        fix.append(line)
    threads = "\n".join(f"- [{name}]({_address(name)})" for name in check.THREADS)
    return f"""# {code}: {check.TITLE}

{check.CAUSE}

## Wrong

```python
{check.WRONG}```

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
