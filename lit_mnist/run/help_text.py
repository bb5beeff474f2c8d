"""The layout of every help: paragraphs, and rows of a name with its meaning. Nothing here imports torch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from lit_mnist.distributed.screen import width_of_text
from lit_mnist.errors import InputError, nearest

HELP_FLAGS = ("--help", "-h")
ALL = "all"
_INDENT = 26
# A sentence begins in lower case in a row, unless it begins with a name such as `ONNX`.
_CAPITAL = re.compile(r"[A-Z](?=[a-z ])")


def help_topic(words: Sequence[str], topics: Sequence[str] = (ALL,)) -> str | None:
    """Returns the word after `--help`, an empty text if there is none, or None if no help is asked for.

    Raises:
        InputError: The word is none of the topics.
    """
    for number, word in enumerate(words):
        flag, _, topic = word.partition("=")
        if flag in HELP_FLAGS:
            after = words[number + 1 : number + 2]
            topic = topic or (after[0] if after and not after[0].startswith("-") else "")
            if topic and topic not in topics:
                hint = nearest(topic, topics) or f": use --help, or --help {ALL}."
                raise InputError(f"There is no help on {topic!r}{hint}")
            return topic
    return None


def paragraph(text: str, indent: str = "") -> str:
    """Returns a paragraph at the width of the terminal; its further lines have an indent."""
    return textwrap.fill(text, width_of_text(), subsequent_indent=indent, break_on_hyphens=False)


def row(name: str, text: str) -> str:
    """Returns a name and its meaning in two columns."""
    indent = " " * _INDENT
    filled = textwrap.wrap(
        text, width_of_text(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    head = f"  {name}"
    if len(head) < _INDENT - 1 and filled:
        filled[0] = head.ljust(_INDENT) + filled[0][_INDENT:]
        return "\n".join(filled)
    return "\n".join([head, *filled])


def first_sentence(text: str) -> str:
    """Returns the first sentence of a description as a row has it, in lower case and without a full stop."""
    first = re.split(r"\.(?: |$)", text)[0]
    return first[0].lower() + first[1:] if _CAPITAL.match(first) else first


def brief(text: str) -> str:
    """Returns the first sentence of a description without its details, such as `learning rate`."""
    first = first_sentence(text).partition(";")[0]
    for mark in (" (", ": "):
        head = first.partition(mark)[0]
        # What is left must still say something.
        first = head if len(head.split()) > 1 else first
    return first
