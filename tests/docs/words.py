"""The words and patterns that the project does not use in text that users read, each with what to write instead.

A row is a regular expression and its replacement. Add a row when a sentence made a reader stumble.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# After these, "training" is a noun that one can count only as a "training run".
_ONE = "a|each|another|one|every|completed|resumed|restarted|interrupted|saved|short|healthy"
_COMPOUND = (
    "run|runs|step|steps|set|sets|sample|samples|split|script|program|loop|data|batch|batches|epoch|command|loss|image"
    "|images|mode|code|metric|metrics|rank|and|or|example"
)
_AFTER_ALSO = "in|on|at|of|with|without|from|for|by|if|when"

ROWS = (
    # Private words.
    (r"\bown_module\b|\bnetworks? of (?:one's|your) own\b|\bown networks of\b", "user module, your network"),
    (r"\btwins?\b", "single-process reference"),
    (r"\b(?:leave|leaves|left|leaving) (?:it |them )?out\b", "exclude, skip, remove"),
    (r"\bput(?:s)? (?:it |them )?aside\b|\b(?:take|takes) (?:it |them )?away\b", "remove, move away"),
    (rf"\b(?:{_ONE}) training(?! (?:{_COMPOUND})\b)(?=[ .,;:)])", "a training run"),
    (r"\banew\b", "recomputed, again"),
    (r"\bgo(?:es)? on\b", "continue, resume"),
    (r"\b(?:un)?sound\b", "valid, damaged"),
    (r"\bfigures?\b", "metrics, numbers"),
    (r"\bto the bit\b|\bthe same bits\b", "bit-for-bit, bit-identical"),
    (r"\brefuse[sd]? by name\b|\bis refused\b", "is rejected with a message that names it"),
    (r"\bthe guilty\b|\bwho failed first\b", "the failed rank"),
    (r"\bwithout a word\b|\bis said so\b", "silently, is logged"),
    (r"\bpictures?\b|\bscenes?\b", "image, drawing"),
    (r"\b(?:un)?foreseen\b", "expected, unexpected"),
    (r"\b(?:keeper|tally|situation|judge[sd]?|agreement)\b", "the field's own term, see CONTRIBUTING.md"),
    (r"\bsteps? that (?:was|were) made\b", "optimizer steps"),
    # Sentences that a native speaker would not write.
    (rf", also (?:{_AFTER_ALSO})\b", "including, even"),
    (r", too(?=[.,;:)]|$)", "also (before the verb)"),
    (r"\bother people's\b|\bnetworks of others\b", "your training code"),
    (r"\b[Tt]he same once more\b", "is repeated"),
    (r"\bcame there\b|\bthere where\b", "ran this part; where"),
    (r"\b[Ww]rong use\b", "incorrect use"),
    (r"\bincluding one without samples\b|\balso on one without samples\b", "even if it has no samples"),
    (r"\bdistinguishable from no\b", "shows no measurable cost"),
    (r"\bends it with exit code\b|\bmodule that raises\b(?! an)", "raises an exception; exits with code"),
    (r"\b0\.\d+ of the time\b", "A s instead of B s (N times faster)"),
    (r"\bbelieves? to be\b", "believes it is"),
    (r"\bbelongs? into\b", "belongs in"),
    (r"\b(?:at the|their) begin\b(?!ning)", "beginning, start"),
    (r"\bfor ever\b", "forever"),
    (
        r"\b(?:is|are|was|were) no (?:file|part|mean|sum|recipe|failure|failures|rounding|combination) (?:of|in)\b",
        "not a",
    ),
    (r"\bPythons\b", "interpreters"),
    (r"\bin the place of\b", "instead of, replaces"),
    (r"\bas it was\b(?= *$|[.])", "unchanged"),
)
_CODE = re.compile(r"^( *)```.*?^\1```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def found(text: str) -> Iterator[str]:
    """Yields each wrong phrase of a text with what to write instead."""
    text = " ".join(text.split())
    for pattern, instead in ROWS:
        for match in re.finditer(pattern, text):
            around = text[max(0, match.start() - 40) : match.end() + 20]
            yield f"{match[0]!r} in {around!r}: write {instead}"


def prose_of(page: str) -> str:
    """Returns the text of a page without its code, its links and its comments, whose lines stay empty."""
    return _CODE.sub(lambda match: "\n" * match[0].count("\n") + "x", page)


def strings_of(path: Path) -> Iterator[str]:
    """Yields the texts of a Python file that a user can see: its messages and the docstrings of its public names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            private = isinstance(node, ast.Module) or node.name.startswith("_")
            if private and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                hidden.add(first.value)
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
            hidden.update(part for part in node.values if isinstance(part, ast.Constant))
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in hidden:
            yield node.value
