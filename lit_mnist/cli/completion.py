"""Shell completion by the protocol of bash: `complete -o default -C 'lit-mnist --complete' lit-mnist`.

The shell passes the line in COMP_LINE and the position of the cursor in COMP_POINT, and reads one proposal per line.
Without a proposal it completes the names of files. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args, get_origin

from lit_mnist.cli.flags import COMMAND_FLAGS, SHORT_FLAGS, options_of
from lit_mnist.cli.trainer_options import POLICY
from lit_mnist.engines.capabilities import ENGINES
from lit_mnist.experiment.schema import options
from lit_mnist.export.flags import FLAGS as EXPORT_FLAGS
from lit_mnist.export.flags import SUFFIXES
from lit_mnist.run.help_text import ALL

_GENERAL = ("--config", "--import", "--help")


def typed_words() -> tuple[list[str], str]:
    """Returns the words before the cursor, without the program, and the beginning of the word at the cursor."""
    line = os.environ.get("COMP_LINE", "")
    before = line[: int(os.environ.get("COMP_POINT") or len(line))]
    words = before.split()
    current = "" if not words or before[-1].isspace() else words.pop()
    return words[1:], current


def proposals(
    words: Sequence[str],
    current: str,
    commands: Mapping[str, str],
    engine: str,
    doctor: Callable[[Sequence[str], str], Iterable[str]],
) -> list[str]:
    """Returns the words that can stand at the cursor.

    Args:
        words: The words before it.
        current: The beginning of the word.
        commands: The commands of the engine.
        engine: Name of the engine.
        doctor: Returns the proposals of the doctor.
    """
    command = words[0] if words and words[0] in commands else "train"
    if command == "doctor":
        return list(doctor(words[1:], current))
    flag, equals, begun = current.partition("=")
    if equals:
        # Bash divides words at an equals sign, and replaces what follows it.
        return [value for value in _values(flag, command) if value.startswith(begun)]
    known = _values(words[-1], command) if words and words[-1].startswith("-") else []
    if not known and current.startswith("-"):
        known = _flags(command, engine)
    elif not known and not words:
        known = list(commands)
    return [each for each in known if each.startswith(current)]


def _flags(command: str, engine: str) -> list[str]:
    if command in {"new", "export"}:
        return [*EXPORT_FLAGS, "--import", "--help"] if command == "export" else ["--help"]
    keys = options_of(command, engine)
    short = [flag for flag, key in SHORT_FLAGS.items() if key in keys]
    further = [f"--trainer.{name}" for name in POLICY if not POLICY[name].reason] if engine == "lightning" else []
    return [*short, *COMMAND_FLAGS[command], *_GENERAL, *(f"--{key}" for key in keys), *further]


def _values(flag: str, command: str) -> list[str]:
    """Returns the values of a flag that has a few."""
    named = {"--engines": [ALL, *ENGINES], "--to": list(SUFFIXES), "--help": [ALL]}
    if flag in named:
        return [] if flag == "--help" and command in {"new", "export"} else named[flag]
    option = options().get(SHORT_FLAGS.get(flag, flag.removeprefix("--")))
    values: list[str] = []
    for kind in option.kinds if option else ():
        values += map(str, get_args(kind)) if get_origin(kind) is Literal else ["true", "false"] if kind is bool else []
    return values
