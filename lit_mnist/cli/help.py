"""The help of the command line, generated from the descriptions of the options."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import lit_mnist
from lit_mnist.cli.flags import COMMAND_FLAGS, SHORT_FLAGS, options_of
from lit_mnist.cli.trainer_options import NOT_FOR_USERS, POLICY
from lit_mnist.experiment.schema import options
from lit_mnist.run.imports import import_packages, split_imports

_INDENT = 26


def help_text(words: Sequence[str], engine: str, commands: Mapping[str, str]) -> str:
    """Returns the help or the version that a command line asks for, or an empty string.

    Args:
        words: The words of the command line.
        engine: Name of the engine.
        commands: What each command of the engine does.
    """
    program = Path(sys.argv[0]).name if engine == "lightning" else f"python -m lit_mnist.engines.{engine}"
    imports, words = split_imports(words)
    if "--version" in words:
        return f"lit_mnist {lit_mnist.__version__}"
    if "--trainer.help" in words:
        return _trainer_help()
    if not {"--help", "-h"} & set(words):
        return ""
    # The help lists the names that they register.
    import_packages(imports)
    if words[0] in COMMAND_FLAGS.keys() & commands.keys() and words[0] != "train":
        return _command_help(program, words[0], commands[words[0]], engine)
    return _overview(program, engine, commands)


def _overview(program: str, engine: str, commands: Mapping[str, str]) -> str:
    keys = options_of("train", engine)
    method = "PyTorch Lightning" if engine == "lightning" else f"the engine {engine}"
    return "\n".join(
        [
            f"usage: {program} [COMMAND] [FLAGS]",
            "",
            f"Trains a network with {method} on any number of ranks, and tests its best weights exactly.",
            "",
            "commands:",
            *(_row(name, text) for name, text in commands.items()),
            "",
            "flags of every command that trains:",
            *(_row(flag, options()[key].help) for flag, key in SHORT_FLAGS.items() if key in keys),
            *_common_rows(),
            "",
            f"All settings: {program} fit --help.",
            *_user_module_help(program, engine),
            *_see_trainer_help(program, engine),
        ]
    )


def _command_help(program: str, command: str, text: str, engine: str) -> str:
    lines = [f"usage: {program} {command} [FLAGS]", "", f"{text[0].upper()}{text[1:]}.", ""]
    lines += [*(_row(flag, meaning) for flag, meaning in COMMAND_FLAGS[command].items()), *_common_rows()]
    names = {key: flag for flag, key in SHORT_FLAGS.items()}
    section = ""
    for key in options_of(command, engine):
        option = options()[key]
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"{section}:"]
        flag = f"--{key}" + (f", {names[key]}" if key in names else "")
        default = "unset" if option.default is None else option.default
        lines.append(_row(flag, f"{option.help} ({option.wanted}; default: {default})"))
    if command == "fit":
        lines += ["", *_see_trainer_help(program, engine)]
    return "\n".join(lines)


def _trainer_help() -> str:
    lines = ["Accepted options of Lightning's Trainer:"]
    lines += [_row(f"--trainer.{name}", "see Lightning's Trainer") for name in POLICY if not POLICY[name].reason]
    lines += ["", "Rejected, and why:"]
    for name, policy in POLICY.items():
        if policy.reason:
            own = "" if policy.user else " (accepted for your module)"
            lines.append(_row(f"--trainer.{name}", policy.reason + own))
    lines += ["", "Rejected for your module, and why:"]
    return "\n".join([*lines, *(_row(f"--{key}", reason) for key, reason in NOT_FOR_USERS.items())])


def _see_trainer_help(program: str, engine: str) -> list[str]:
    return [f"Further options of Lightning's Trainer: {program} fit --trainer.help."] if engine == "lightning" else []


def _user_module_help(program: str, engine: str) -> list[str]:
    if engine != "lightning":
        return []
    return [
        "",
        f"your own LightningModule: {program} --config mine.yaml --import my_package",
        _row("--model, --data CLASS", "its class and that of its data, such as my_package.Lit, here or in the file"),
        _row("--model.NAME VALUE", "an argument of the class; the settings of the models above are not accepted"),
        "",
    ]


def _common_rows() -> list[str]:
    return [
        _row("--config FILE", "a YAML file of settings, or lit_mnist:NAME.yaml of the package; flags override it"),
        _row(
            "--import PACKAGE",
            "a package or module of your own, which registers networks or data sets, or defines classes that the "
            "configuration names",
        ),
    ]


def _row(name: str, text: str) -> str:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * _INDENT
    filled = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
    head = f"  {name}"
    if len(head) < _INDENT - 1 and filled:
        filled[0] = head.ljust(_INDENT) + filled[0][_INDENT:]
        return "\n".join(filled)
    return "\n".join([head, *filled])
