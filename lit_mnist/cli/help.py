"""The help of the command line, generated from the descriptions of the options.

`--help` fits on a screen: what the command does, and the flags that most people need. `--help all` has every option.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import lit_mnist
from lit_mnist.cli.flags import COMMAND_FLAGS, SHORT_FLAGS, options_of
from lit_mnist.cli.trainer_options import NOT_FOR_USERS, POLICY
from lit_mnist.experiment.schema import options
from lit_mnist.run.help_text import ALL, brief, first_sentence, help_topic, paragraph, row
from lit_mnist.run.imports import import_packages, split_imports

# Options without a short flag that are in the short help.
_SHOWN = ("model.net", "data.name")
# The short flags that the overview leaves to the help of the commands.
_RARE = ("--inject", "--launcher", "--servers", "--keep", "--seed", "--save-every", "--max-restarts")
_COMMON = {
    "--config FILE": "a YAML file of settings, or lit_mnist:NAME.yaml of the package; flags override it",
    "--import PACKAGE": "your package or module, which registers networks or data sets, or has the classes that the "
    "configuration names",
}


def help_text(words: Sequence[str], engine: str, commands: Mapping[str, str]) -> str:
    """Returns the help or the version that a command line asks for, or an empty string.

    Args:
        words: The words of the command line.
        engine: Name of the engine.
        commands: What each command of the engine does.

    Raises:
        InputError: There is no such help.
    """
    program = Path(sys.argv[0]).name if engine == "lightning" else f"python -m lit_mnist.engines.{engine}"
    imports, words = split_imports(words)
    if "--version" in words:
        return f"lit_mnist {lit_mnist.__version__}"
    if "--trainer.help" in words:
        return _trainer_help()
    has_help = COMMAND_FLAGS.keys() & commands.keys()
    topic = help_topic(words, (ALL, *has_help))
    if topic is None:
        return ""
    # The help lists the names that they register.
    import_packages(imports)
    command = topic if topic in has_help else words[0]
    if topic == ALL:
        return _everything(program, command if command in has_help else "train", commands, engine)
    if command in has_help and command != "train":
        return _command_help(program, command, commands[command], engine)
    return _overview(program, engine, commands)


def _overview(program: str, engine: str, commands: Mapping[str, str]) -> str:
    method = "PyTorch Lightning" if engine == "lightning" else f"the engine {engine}"
    about = f"Trains a network with {method} on any number of ranks, and tests its best weights exactly."
    lines = [f"usage: {program} [COMMAND] [FLAGS]", "", paragraph(about), "", "commands:"]
    lines += [row(name, text) for name, text in commands.items()]
    lines += ["", "flags of every command that trains:", *_short_rows("train", engine, without=_RARE), *_common_rows()]
    lines.append("")
    if engine == "lightning":
        own = f"{program} --config mine.yaml --import my_package"
        lines.append(row("your LightningModule", f"{own}; its arguments are --model.NAME VALUE"))
    lines += [
        row("one command", f"{program} COMMAND --help"),
        row("every option", f"{program} --help {ALL}"),
        row("completion", "complete -o default -C 'lit-mnist --complete' lit-mnist, in bash"),
    ]
    return "\n".join(lines)


def _command_help(program: str, command: str, text: str, engine: str) -> str:
    lines = [f"usage: {program} {command} [FLAGS]", "", paragraph(f"{text[0].upper()}{text[1:]}."), "", "flags:"]
    lines += [row(flag, meaning) for flag, meaning in COMMAND_FLAGS[command].items()]
    lines += [*_short_rows(command, engine), *_common_rows(), ""]
    lines.append(row("every option", f"{program} {command} --help {ALL}"))
    if command == "fit" and engine == "lightning":
        lines.append(row("of Lightning's Trainer", f"{program} fit --trainer.help"))
    return "\n".join(lines)


def _everything(program: str, command: str, commands: Mapping[str, str], engine: str) -> str:
    """Returns the help with every option of a command."""
    text = commands[command]
    lines = [f"usage: {program} {command} [FLAGS]", "", paragraph(f"{text[0].upper()}{text[1:]}."), "", "flags:"]
    lines += [*(row(flag, meaning) for flag, meaning in COMMAND_FLAGS[command].items()), *_common_rows()]
    names = {key: flag for flag, key in SHORT_FLAGS.items()}
    section = ""
    for key in options_of(command, engine):
        option = options()[key]
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"{section}:"]
        flag = f"--{key}" + (f", {names[key]}" if key in names else "")
        default = "unset" if option.default is None else option.default
        lines.append(row(flag, f"{option.help} ({option.wanted}; default: {default})"))
    if engine == "lightning":
        lines += ["", *_user_module_rows()]
    return "\n".join([*lines, *(["", _trainer_help()] if engine == "lightning" and command != "compare" else [])])


def _short_rows(command: str, engine: str, without: Sequence[str] = ()) -> list[str]:
    """Returns the short flags of a command, and the network and the data by their names."""
    keys, known = options_of(command, engine), options()
    short = brief if without else first_sentence
    flags = {flag: short(known[key].help) for flag, key in SHORT_FLAGS.items() if key in keys and flag not in without}
    flags |= {f"--{key}": known[key].wanted for key in _SHOWN if key in keys and not without}
    return [row(flag, text) for flag, text in flags.items()]


def _trainer_help() -> str:
    accepted = ", ".join(f"--trainer.{name}" for name in POLICY if not POLICY[name].reason)
    lines = ["Accepted options of Lightning's Trainer, which its documentation describes:"]
    lines += [paragraph(f"  {accepted}", "  "), "", "Rejected, and why:"]
    for name, policy in POLICY.items():
        if policy.reason:
            own = "" if policy.user else " (accepted for your module)"
            lines.append(row(f"--trainer.{name}", policy.reason + own))
    lines += ["", "Rejected for your module, and why:"]
    return "\n".join([*lines, *(row(f"--{key}", reason) for key, reason in NOT_FOR_USERS.items())])


def _user_module_rows() -> list[str]:
    return [
        "your own LightningModule:",
        row("--model, --data CLASS", "its class and that of its data, such as my_package.Lit, here or in the file"),
        row("--model.NAME VALUE", "an argument of the class; the settings of the models above are not accepted"),
    ]


def _common_rows() -> list[str]:
    return [row(flag, meaning) for flag, meaning in _COMMON.items()]
