"""The help of the command line, generated from the descriptions of the options."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import lit_mnist
from lit_mnist.cli.flags import COMMANDS, SHORT_FLAGS, commands_of, options_of
from lit_mnist.cli.imports import import_packages, split_imports
from lit_mnist.cli.trainer_options import POLICY
from lit_mnist.experiment.schema import options
from lit_mnist.export.flags import help_of_export

_INDENT = 26


def help_text(words: Sequence[str], engine: str) -> str:
    """Returns the help or the version that a command line asks for, or an empty string."""
    program = Path(sys.argv[0]).name if engine == "lightning" else f"python -m lit_mnist.engines.{engine}"
    if words[:1] == ["export"]:
        return help_of_export(words[1:], program)
    imports, words = split_imports(words)
    if "--version" in words:
        return f"lit_mnist {lit_mnist.__version__}"
    if "--trainer.help" in words:
        return _trainer_help()
    if not {"--help", "-h"} & set(words):
        return ""
    # The help lists the names that they register.
    import_packages(imports)
    if words[0] in commands_of(engine) and words[0] != "train":
        return _command_help(program, words[0], engine)
    return _overview(program, engine)


def _overview(program: str, engine: str) -> str:
    keys = options_of("train", engine)
    method = "PyTorch Lightning" if engine == "lightning" else f"the engine {engine}"
    return "\n".join(
        [
            f"usage: {program} [COMMAND] [FLAGS]",
            "",
            f"Trains a network with {method} on any number of ranks, and tests its best weights exactly.",
            "",
            "commands:",
            *(_row(name, COMMANDS[name][0]) for name in commands_of(engine)),
            *(_own_commands() if engine == "lightning" else ()),
            "",
            "flags of every command that trains:",
            *(_row(flag, options()[key].help) for flag, key in SHORT_FLAGS.items() if key in keys),
            *_common_rows(),
            "",
            f"All settings: {program} fit --help.",
            *_own_module_help(program, engine),
            *_see_trainer_help(program, engine),
        ]
    )


def _own_commands() -> list[str]:
    return [
        _row("doctor", "examine another training for silent faults"),
        _row("export", "write the network of a run as safetensors, ONNX or pt2"),
    ]


def _command_help(program: str, command: str, engine: str) -> str:
    text, own = COMMANDS[command]
    lines = [f"usage: {program} {command} [FLAGS]", "", f"{text[0].upper()}{text[1:]}.", ""]
    lines += [*(_row(flag, meaning) for flag, meaning in own.items()), *_common_rows()]
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
    accepted = [_row(f"--trainer.{name}", "see Lightning's Trainer") for name in POLICY if not POLICY[name].reason]
    rejected = [_row(f"--trainer.{name}", policy.reason) for name, policy in POLICY.items() if policy.reason]
    return "\n".join(["Accepted options of Lightning's Trainer:", *accepted, "", "Rejected, and why:", *rejected])


def _see_trainer_help(program: str, engine: str) -> list[str]:
    return [f"Further options of Lightning's Trainer: {program} fit --trainer.help."] if engine == "lightning" else []


def _own_module_help(program: str, engine: str) -> list[str]:
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
