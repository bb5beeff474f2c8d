"""A request that trains the user's own LightningModule. Nothing here imports torch or a class that a file names.

    lit-mnist fit --config mine.yaml --import my_package --devices 2

A configuration names the classes by `class_path` and `init_args`, as for LightningCLI in subclass mode. It may name
classes of the packages of `--import`, and of those that a configuration may always name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_mnist.cli.config_file import find_config, read_config_file
from lit_mnist.cli.flags import CKPT_PATH, COMMANDS, EVALUATING, SHORT_FLAGS
from lit_mnist.cli.imports import FLAG, split_imports
from lit_mnist.cli.own_request import CLASSES, OwnRequest, check_classes, parsed
from lit_mnist.cli.parser import split_command, split_flags
from lit_mnist.cli.trainer_options import POLICY, check_no_file
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment.schema import SECTIONS, SEED, convert, options

# The options of `run` and `trainer` that have another meaning for another module, or none.
_RUN = ("dir", "resume", "save_every", "keep", "timeout", "max_restarts", "inject", "threads")
_DOTTED = re.compile(r"\w+(\.\w+)+")
_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
_CONVERTED = {f"run.{name}" for name in _RUN} | {SEED}
_REJECTED = {
    "barebones": "it turns off checkpoints and metrics, which every run writes: leave it out",
    "default_root_dir": "all output goes to the run folder: use --run-dir",
    "enable_checkpointing": "last.ckpt is always saved, so that a run can be resumed: leave it out",
    "fast_dev_run": "it turns off checkpoints and loggers: use --max-steps, or trainer.limit_train_batches",
    "model_registry": "it uploads checkpoints: leave it out",
    "plugins": "the precision, the batch norm and the checkpoint IO are plugins already: use --precision or "
    "--trainer.sync_batchnorm",
    "timeout": "use --run.timeout",
}


def read_own_request(argv: list[str]) -> OwnRequest | None:
    """Returns the request of a command line that names a class for the model, otherwise None.

    Raises:
        InputError: A flag, a file or a class is rejected; nothing was imported.
    """
    imports, words = split_imports(argv)
    command, words = split_command(words)
    if command == "compare":
        return None
    pairs = split_flags(words, COMMANDS[command][1])
    files = [(find_config(values[0]), values[0]) for flag, values in pairs if flag in {"--config", "-c"} and values]
    earlier = _earlier_config(command, pairs)
    layers = [*earlier, *((str(path), read_config_file(path)) for path, _ in files)]
    flags = [(flag.removeprefix("--"), values[0] if values else None) for flag, values in pairs]
    named = [layer[1]["model"] for layer in layers if isinstance(layer[1], dict) and "model" in layer[1]]
    named += [parsed(value) for key, value in flags if key == "model"]
    named += [{"class_path": value} for key, value in flags if key == "model.class_path"]
    if not any(map(_names_class, named)):
        return None
    request = OwnRequest(command, imports)
    sections: dict[str, Any] = {}
    for place, content in layers:
        if not isinstance(content, dict):
            raise InputError(f"The configuration {place} has no settings.")
        _merge(sections, content, place)
    for name, value in sections.items():
        _add(request, name, value)
    _add_flags(request, pairs)
    check_classes(request)
    return request


def _names_class(value: Any) -> bool:
    if isinstance(value, str):
        return bool(_DOTTED.fullmatch(value))
    return isinstance(value, dict) and "class_path" in value


def _earlier_config(command: str, pairs: list[tuple[str, list[str]]]) -> list[tuple[str, Any]]:
    """Returns the configuration of the run that is resumed or evaluated."""
    flag = "--ckpt" if command in EVALUATING else "--resume"
    given = [values[0] for name, values in pairs if name in {flag, CKPT_PATH, "--run.resume"} and values]
    folders = [Path(given[-1])] if given else []
    if given == ["auto"]:
        folders = [Path(values[0]) for name, values in pairs if name in {"--run-dir", "--run.dir"} and values]
    for folder in folders:
        for place in (folder, folder.parent, folder.parent.parent):
            if (path := place / "config.yaml").is_file():
                # The project's own runs resume from their checkpoint alone.
                with suppress(InputError):
                    return [(str(path), read_config_file(path))]
    return []


def _merge(sections: dict[str, Any], content: Mapping[str, Any], place: str) -> None:
    """Merges a file into earlier ones; another class replaces the arguments of the earlier one."""
    for name, value in content.items():
        if name == "import":
            raise InputError(f"import in {place} is not accepted: a configuration imports nothing; use {FLAG} PACKAGE.")
        if name != SEED and name not in SECTIONS:
            raise InputError(f"Unknown key {name} in {place}{nearest(str(name), [SEED, *SECTIONS]) or '.'}")
        if name in SECTIONS and not isinstance(value, dict) and not (name in CLASSES and isinstance(value, str)):
            raise InputError(f"{name} in {place} must be a section of settings, but is {value}.")
        old = sections.get(name) or {}
        if name in CLASSES:
            sections[name] = _merge_class(old, {"class_path": value} if isinstance(value, str) else value, name, place)
        else:
            sections[name] = value if name == SEED else {**old, **value}


def _merge_class(old: dict[str, Any], new: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    if unknown := new.keys() - {"class_path", "init_args", "dict_kwargs"}:
        raise InputError(
            f"{name}.{min(map(str, unknown))} in {place} is an option of the project's own experiment, or an argument "
            f"of the class: put arguments below {name}.init_args."
        )
    if not old or new.get("class_path") not in {None, old.get("class_path")}:
        return new
    return {**old, **new, "init_args": {**(old.get("init_args") or {}), **(new.get("init_args") or {})}}


def _add(request: OwnRequest, name: str, value: Any) -> None:
    """Adds a section of the merged files."""
    if name in CLASSES:
        request.seen.append((name, value))
        if "class_path" in value:
            request.classes[name] = str(value["class_path"])
        request.words.append(f"--{name}={json.dumps(value)}")
    elif name == SEED:
        request.settings |= convert({SEED: value})
    else:
        for key, part in value.items():
            if name == "run" and key == "resume" and part is not None:
                raise InputError("run.resume is accepted on the command line only: use --resume RUN_DIR_OR_CKPT.")
            _set(request, f"{name}.{key}", part, json.dumps(part), " in a configuration")


def _add_flags(request: OwnRequest, pairs: list[tuple[str, list[str]]]) -> None:
    for flag, values in pairs:
        key = SHORT_FLAGS.get("--resume" if flag == CKPT_PATH and request.trains else flag, flag.removeprefix("--"))
        if flag in {"--config", "-c"}:
            continue
        if flag == "--ckpt" or (flag == CKPT_PATH and not request.trains):
            request.checkpoint = values[0]
            continue
        if not values:
            raise InputError(f"{flag} needs a value.")
        head, _, rest = key.partition(".")
        if flag == "--images" or (flag in SHORT_FLAGS and head in CLASSES):
            raise InputError(
                f"{flag} is an option of the project's own experiment, not of {request.classes.get('model', 'a class')}"
                ": give its arguments as --model.NAME and --data.NAME."
            )
        if head not in {*SECTIONS, SEED} or (not rest and head != SEED and head not in CLASSES):
            known = [*SHORT_FLAGS, "--config", FLAG, "--model.NAME", "--data.NAME"]
            raise InputError(f"Unknown flag {flag}{nearest(flag, known) or '.'}")
        if head in CLASSES:
            content = parsed(values[0])
            request.seen.append((key, content))
            if rest in {"", "class_path"}:
                named = content.get("class_path") if isinstance(content, dict) else content
                if named == request.classes.get(head) and named == content:
                    # It would discard the arguments in the files.
                    continue
                request.classes[head] = str(named or request.classes.get(head))
            request.words.append(f"--{key}={values[0]}")
        else:
            _set(request, key, values[0], values[0], "")


def _set(request: OwnRequest, key: str, value: Any, text: str, source: str) -> None:
    """Sets an option of `trainer` or `run`, or the seed."""
    section, _, name = key.partition(".")
    name = name.partition(".")[0].removesuffix("+")
    if section == "run" and name == "import":
        raise InputError(f"{key}{source} is not accepted: a configuration imports nothing; use {FLAG} PACKAGE.")
    if section == "run" and name not in _RUN:
        known = f"run.{name}" in options()
        raise InputError(
            f"{key}{source} is an option of the project's own experiment only: leave it out."
            if known
            else f"Unknown key {key}{source}{nearest(key, _CONVERTED) or '.'}"
        )
    if section == "trainer":
        if name in _REJECTED:
            if parsed(value) in [None, False, POLICY[name].default if name in POLICY else None]:
                return
            raise InputError(f"trainer.{name} is not accepted: {_REJECTED[name]}.")
        if key == "trainer.strategy":
            if value not in _STRATEGIES:
                raise InputError(f"trainer.strategy must be one of {', '.join(_STRATEGIES)}, but is {value}.")
            request.settings[key] = value
            return
        if key not in options():
            if name not in POLICY:
                raise InputError(f"Unknown key {key}{source}{nearest(key, [*options(), *_trainer_keys()]) or '.'}")
            check_no_file(key, parsed(value))
            request.seen.append((key, parsed(value)))
            request.words.append(f"--{key}={text}")
            return
    request.settings |= convert({key: value}, source)


def _trainer_keys() -> list[str]:
    return [f"trainer.{name}" for name in POLICY]
