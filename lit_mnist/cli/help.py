"""The help of the command line, made from the options' own descriptions."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lit_mnist.cli.parser import COMMANDS, EVALUATING, SHORT_FLAGS
from lit_mnist.cli.trainer_options import POLICY
from lit_mnist.experiment.schema import Option, options

_INDENT = 26


def asks_for_help(words: Sequence[str]) -> str:
    """Returns the help or the version that a command line asks for, or nothing."""
    program = Path(sys.argv[0]).name
    if "--version" in words:
        return f"lit_mnist {version('lit_mnist')}"
    if "--trainer.help" in words:
        return trainer_help()
    if not {"--help", "-h"} & set(words):
        return ""
    return help_text(program, words[0] if words[0] in COMMANDS else None)


def help_text(program: str, command: str | None) -> str:
    """Returns the help of a command, or of the program where none is named.

    Args:
        program: How the program is called, such as `train.py`.
        command: The command.
    """
    return _overview(program) if command is None else _of_command(program, command)


def _overview(program: str) -> str:
    short = [_row(flag, options()[key].help) for flag, key in SHORT_FLAGS.items()]
    return "\n".join(
        [
            f"usage: {program} [COMMAND] [FLAGS]",
            "",
            "Trains a network with PyTorch Lightning on any number of ranks, and tests its best weights exactly.",
            "",
            "commands:",
            *(_row(name, text) for name, (text, _) in COMMANDS.items()),
            "",
            "flags of every command that trains:",
            *short,
            _row("--config FILE", "a YAML file of settings; a flag overrides it"),
            "",
            f"All settings: {program} fit --help. Lightning's further options: {program} fit --trainer.help.",
        ]
    )


def _of_command(program: str, command: str) -> str:
    text, own = COMMANDS[command]
    lines = [
        f"usage: {program} {'' if command == 'train' else command + ' '}[FLAGS]",
        "",
        f"{text[0].upper()}{text[1:]}.",
        "",
    ]
    lines += [_row(flag, meaning) for flag, meaning in own.items()]
    lines.append(_row("--config FILE", "a YAML file of settings; a flag overrides it"))
    names = {key: flag for flag, key in SHORT_FLAGS.items()}
    section = ""
    for key, option in options().items():
        if command in EVALUATING and key in {"run.resume", "run.save_every", "run.keep", "run.max_restarts"}:
            continue
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"{section}:"]
        flag = f"--{key}" + (f", {names[key]}" if key in names else "")
        lines.append(_row(flag, f"{option.help} {_facts(option)}"))
    if command in {"train", "fit"}:
        lines += ["", f"Lightning's further options: {program} fit --trainer.help."]
    return "\n".join(lines)


def trainer_help() -> str:
    """Returns the help of Lightning's further options."""
    accepted = [
        _row(f"--trainer.{name}", "accepted; see Lightning's Trainer") for name in POLICY if not POLICY[name].reason
    ]
    others = [_row(f"--trainer.{name}", str(POLICY[name].reason)) for name in POLICY if POLICY[name].reason]
    return "\n".join(["Lightning's further options:", *accepted, "", "Not accepted, and what to use instead:", *others])


def _facts(option: Option) -> str:
    return f"({option.wanted}; default: {'unset' if option.default is None else option.default})"


def _row(name: str, text: str) -> str:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * _INDENT
    filled = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
    head = f"  {name}"
    if len(head) < _INDENT - 1 and filled:
        filled[0] = head.ljust(_INDENT) + filled[0][_INDENT:]
        return "\n".join(filled)
    return "\n".join([head, *filled])
