"""Turns the messages of jsonargparse, which list every type that a value is not of, into one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec

from lit_mnist.cli.class_names import ALLOWED, CLASSES, explain_allowed
from lit_mnist.errors import nearest

# A line of a list of errors that says what is wrong, not which other type the value could have had.
_CAUSE = re.compile(
    r"^ *- (?!Expected a|Not a valid subclass|Problem with|Does not validate|a class path|a dict)(.+)", re.M
)


def explain(
    message: str, key: str = "", known: Mapping[str, Collection[str]] | None = None, allowed: Collection[str] = ALLOWED
) -> str:
    """Shortens a message of jsonargparse to a sentence.

    Args:
        message: The message.
        key: The option, if the message does not name it.
        known: The names of Lightning's classes for an option, which are proposed for an unknown name.
        allowed: The modules and packages whose classes may be named.
    """
    if found := re.match(r'Parser key "([^"]+)":\s*', message):
        key, message = found[1], message[found.end() :]
    if denied := re.search(r"Importing '([^']+)' is not allowed", message):
        return f"{_place(key, message[: denied.start()])} names {denied[1]}: {explain_allowed(allowed, denied[1])}"
    if option := re.search(r"Option '([^']+)' is not accepted", message):
        return _unknown_argument(key, message[: option.start()], option[1])
    if key in CLASSES and (given := re.search(r"Given value: ([\w.]+)$", message)):
        kind = "LightningModule" if key == "model" else "LightningDataModule"
        return f"{key}: {given[1]} is not the name of a {kind}{_similar(given[1])}"
    if unknown := _unknown_name(key, message, known or {}):
        return unknown
    name = ""
    if problem := re.search(r"given class_path '([^']+)':\s*", message):
        name, message = problem[1].rpartition(".")[2], message[problem.end() :]
    if missing := re.search(r"(?:Requirement|No module named) '([\w.-]+)", message):
        package = missing[1].partition(".")[0]
        if find_spec(package) is None:
            return f"{key}: {name or 'It'} needs the package {package}, which is not installed."
        if package != missing[1]:
            return f"{key}: {name or 'It'} needs {missing[1]}, but there is no such module in the package {package}."
    reason = _reason(message)
    reason = reason if reason.endswith(".") else f"{reason}."
    if name:
        return f"{key}: {name} cannot be made: {reason}"
    return f"{key} {reason}" if reason.startswith("must be") else f"{key}: {reason}"


def _unknown_name(key: str, message: str, known: Mapping[str, Collection[str]]) -> str:
    """Returns a message about a name that a module does not have, or about a name without a module; else nothing."""
    lacking = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message)
    unknown = lacking or re.search(r"(dot import path string: )(\w+)", message)
    if unknown is None:
        return ""
    place, name = _place(key, message[: unknown.start()]), unknown[2]
    if lacking and not (key in known and lacking[1].startswith("lightning.")):
        return f"{place}: there is no {lacking[1]}.{name}{_similar(f'{lacking[1]}.{name}')}"
    if key not in known:
        return f"{place} must name a class or function with its module, such as my_package.{name}, but is {name}."
    kind = key.rpartition(".")[2].removesuffix("s")
    return f"{key}: Unknown {kind} {name}{nearest(name, known[key]) or ': name one of Lightning, with its module.'}"


def _similar(path: str) -> str:
    """Returns a hint with the most similar name in the same module, or a full stop."""
    module = path.rpartition(".")[0]
    names = vars(sys.modules[module]) if module in sys.modules else ()
    others = [f"{module}.{name}" for name in names if not name.startswith("_")]
    return "." if path in others else nearest(path, others) or "."


def _place(key: str, before: str) -> str:
    """Returns the key of the part that a message is about, such as `model.activation`."""
    return ".".join([key, *re.findall(r'Parser key "([^"]+)"', before)])


def _unknown_argument(key: str, before: str, name: str) -> str:
    """Returns a message about an argument that a class does not have, with the most similar one that it has."""
    # Imported here, because it imports Lightning, which only some commands need.
    from lit_mnist.cli.given import arguments_of, find_named

    place = _place(key, before)
    path = (re.findall(r"given class_path '([^']+)'", before) or [""])[-1]
    kind = find_named(path)
    flag = f"--{place}." if key in CLASSES else ""
    known = [] if kind is None else [f"{flag}{argument}" for argument in arguments_of(kind)]
    hint = nearest(f"{flag}{name}", known) or (f": it has {', '.join(arguments_of(kind))}." if known else ".")
    return f"{place}.{name}: {path.rpartition('.')[2] or 'The class'} has no argument {name}{hint}"


def _reason(message: str) -> str:
    option = ""
    if found := re.match(r'Parser key "([^"]+)":\s*', message):
        option, message = f"{found[1]} ", message[found.end() :]
    if wrong := re.match(r"Expected a (.+)\. Got value: (.*)", message):
        return f"{option}must be {_type(wrong[1])}, but is {wrong[2]}."
    if not re.match(r"(- Expected a path|- Does not validate|Does not validate)", message):
        return " ".join(re.split(r"\n\s*-|\n\s*Given", message)[0].split())
    if cause := _CAUSE.search(message.partition("Errors:")[2]):
        return cause[1]
    types, value = (re.search(pattern, message) for pattern in (r"Subtypes: \[(.*)\]", r"Given value: (.*)"))
    return f"{option}must be {_type(types[1] if types else '')}, but is {value[1][:100] if value else 'not'}."


def _type(text: str) -> str:
    """Returns the types of a message in words, such as `int or null`."""
    text = re.sub(r"typing\.Literal\[([^]]*)\]", lambda found: found[1].replace("'", ""), text)
    names = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("NoneType", "null").split(", ")
    return " or ".join(names)
