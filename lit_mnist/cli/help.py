"""The help of the command line, made from the options' own descriptions."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import lit_mnist
from lit_mnist.cli.flags import COMMANDS, SHORT_FLAGS, commands_of, options_of
from lit_mnist.cli.trainer_options import POLICY
from lit_mnist.experiment.schema import Option, options

_INDENT = 26
_CONFIG = "a YAML file of settings, or lit_mnist:NAME.yaml of the package; a flag overrides it"


def asks_for_help(words: Sequence[str], engine: str) -> str:
    """Returns the help or the version that a command line asks for, or nothing."""
    if "--version" in words:
        return f"lit_mnist {lit_mnist.__version__}"
    if "--trainer.help" in words:
        return trainer_help()
    if not {"--help", "-h"} & set(words):
        return ""
    name = Path(sys.argv[0]).name
    program = name if engine == "lightning" else f"python -m lit_mnist.engines.{engine}"
    return _of_command(program, words[0], engine) if words[0] in commands_of(engine) else _overview(program, engine)


def _overview(program: str, engine: str) -> str:
    keys = options_of("train", engine)
    method = "PyTorch Lightning" if engine == "lightning" else f"the engine {engine}"
    further = f" Lightning's further options: {program} fit --trainer.help." if engine == "lightning" else ""
    short = [_row(flag, options()[key].help) for flag, key in SHORT_FLAGS.items() if key in keys]
    return "\n".join(
        [
            f"usage: {program} [COMMAND] [FLAGS]",
            "",
            f"Trains a network with {method} on any number of ranks, and tests its best weights exactly.",
            "",
            "commands:",
            *(_row(name, COMMANDS[name][0]) for name in commands_of(engine)),
            "",
            "flags of every command that trains:",
            *short,
            _row("--config FILE", _CONFIG),
            "",
            f"All settings: {program} fit --help.{further}",
        ]
    )


def _of_command(program: str, command: str, engine: str) -> str:
    text, own = COMMANDS[command]
    lines = [
        f"usage: {program} {'' if command == 'train' else command + ' '}[FLAGS]",
        "",
        f"{text[0].upper()}{text[1:]}.",
        "",
    ]
    lines += [_row(flag, meaning) for flag, meaning in own.items()]
    lines.append(_row("--config FILE", _CONFIG))
    names = {key: flag for flag, key in SHORT_FLAGS.items()}
    section = ""
    for key in options_of(command, engine):
        option = options()[key]
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"{section}:"]
        flag = f"--{key}" + (f", {names[key]}" if key in names else "")
        lines.append(_row(flag, f"{option.help} {_facts(option)}"))
    if command in {"train", "fit"} and engine == "lightning":
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
