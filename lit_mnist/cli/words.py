"""Splits the words of a command line into a command and flags with their values."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from lit_mnist.cli.flags import CKPT_PATH, SHORT_FLAGS
from lit_mnist.cli.trainer_options import is_trainer_option
from lit_mnist.errors import InputError

CONFIG_FLAGS = ("--config", "-c")
_VALUED = {*SHORT_FLAGS, *CONFIG_FLAGS, CKPT_PATH}


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command, by default `train`, and the other words."""
    if not words or words[0].startswith("-"):
        return "train", list(words)
    return words[0], list(words[1:])


def split_flags(words: Sequence[str], known: Container[str]) -> list[tuple[str, list[str]]]:
    """Returns each flag with its values: one, or several for `--images`.

    Raises:
        InputError: A word is not a flag, or a flag has no value.
    """
    pairs: list[tuple[str, list[str]]] = []
    rest = list(words)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("-"):
            raise InputError(f"{flag!r} is not a flag: a value follows the flag that it belongs to.")
        flag, equals, value = flag.partition("=")
        if flag.endswith("+") and not is_trainer_option(flag.removeprefix("--")):
            raise InputError(f"{flag} is not accepted: give the whole value to {flag[:-1]}.")
        values = [value] if equals else []
        while rest and not equals and not _is_flag(rest[0]) and (flag == "--images" or not values):
            values.append(rest.pop(0))
        if "" in values or (not values and (flag in known or flag in _VALUED)):
            raise InputError(f"{flag} needs a value.")
        pairs.append((flag, values))
    return pairs


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)
