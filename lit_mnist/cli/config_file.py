"""Finds and reads configuration files, with limits on what a YAML parser may read.

Without limits, it would read from any device, recurse without a bound, and expand aliases: a hundred bytes can become
gigabytes.
"""

from __future__ import annotations

import stat
from collections import Counter
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from lit_mnist.errors import InputError

_PACKAGED = "lit_mnist:"
_CONFIGS = Path(__file__).parents[1] / "configs"
_MAX_BYTES = 100_000
_MAX_VALUES = 10_000
_MAX_DEPTH = 30
# Python does not parse longer numbers, and no setting is a longer text.
_MAX_LENGTH = 3_000


def find_config(name: str) -> Path:
    """Returns the path of a configuration file; `lit_mnist:gpu.yaml` is one of the package's own.

    Raises:
        InputError: The package has no such file.
    """
    if not name.startswith(_PACKAGED):
        return Path(name).expanduser()
    own = name.removeprefix(_PACKAGED)
    known = sorted(path.name for path in _CONFIGS.glob("*.yaml"))
    if own not in known:
        raise InputError(f"The package has no configuration {own!r}: use {', '.join(known)}.")
    return _CONFIGS / own


def read_config_file(path: Path) -> Any:
    """Returns the content of a configuration file.

    Raises:
        InputError: It is not a regular file, not YAML, too large, or nested too deeply.
    """
    try:
        if not path.exists():
            raise InputError(f"The configuration {path} cannot be read: there is no such file{_below(path)}.")
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"The configuration {path} cannot be read: it is not a file.")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"The configuration {path} is not text in UTF-8: save it as UTF-8.") from error
    except OSError as error:
        raise InputError(f"The configuration {path} cannot be read: {error}.") from error
    if len(content) > _MAX_BYTES:
        raise InputError(f"The configuration {path} is larger than {_MAX_BYTES} bytes.")
    return parse_yaml(text, f"The configuration {path}")


def _below(path: Path) -> str:
    """Returns a hint if a folder of this one has the file, as after `lit-mnist new` without `cd`."""
    found = [] if path.is_absolute() else sorted(Path().glob(f"*/{escape(str(path))}"))[:1]
    folder = found[0].parents[len(path.parts) - 1] if found else ""
    return f". There is {found[0]}: name it, or enter its folder first with `cd {folder}`" if found else ""


def parse_yaml(text: str, source: str) -> Any:
    """Returns the content of a YAML text.

    Args:
        text: The text.
        source: Where it comes from, the subject of a message.

    Raises:
        InputError: It is not YAML, too large, or nested too deeply.
    """
    try:
        _check_size(text, source)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason, place = str(error), ""
        if isinstance(error, yaml.MarkedYAMLError) and error.problem:
            mark = error.problem_mark or error.context_mark
            reason, place = error.problem, f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{source} is not YAML: {' '.join(reason.split())[:300]}{place}.") from error


class _Loader(yaml.SafeLoader):
    """A safe loader that rejects a key given twice, of which YAML would silently use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping; raises a ConstructorError if a key is given twice."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(keys).items():
            if count > 1:
                problem = f"the key {key} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _check_size(text: str, source: str) -> None:
    """Rejects YAML that would expand to far more than its text, before it is constructed."""
    left, sizes = _MAX_VALUES, dict[str | None, int]()
    # The anchor of each open collection, and the number of values left when it began.
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor would never end.
            left -= sizes.get(event.anchor, _MAX_VALUES + 1)
        elif isinstance(event, yaml.ScalarEvent):
            left -= 1
            if event.anchor:
                sizes[event.anchor] = 1
            if len(event.value) > _MAX_LENGTH:
                raise InputError(f"{source} has a value of {len(event.value)} characters.")
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, left))
            left -= 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = before - left
        if left < 0 or len(opened) > _MAX_DEPTH:
            raise InputError(f"{source} has too many values, or nests them too deeply.")
