"""Turns the messages of jsonargparse, which list every type that a value is not of, into one sentence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from lit_mnist.cli.own_request import CLASSES
from lit_mnist.cli.trainer_options import PACKAGES
from lit_mnist.errors import nearest

# A line of a list of errors that says what is wrong, not which other type the value could have had.
_CAUSE = re.compile(
    r"^ *- (?!Expected a|Not a valid subclass|Problem with|Does not validate|a class path|a dict)(.+)", re.M
)


def explain(message: str, key: str = "", known: Mapping[str, Collection[str]] | None = None) -> str:
    """Shortens a message of jsonargparse to a sentence.

    Args:
        message: The message.
        key: The option, if the message does not name it.
        known: The names of Lightning's classes for an option, which are proposed for an unknown name.
    """
    if found := re.match(r'Parser key "([^"]+)":\s*', message):
        key, message = found[1], message[found.end() :]
    if denied := re.search(r"Importing '([^']+)' is not allowed", message):
        return f"{key} names {denied[1]}: a configuration may name classes of {', '.join(PACKAGES)} only."
    if key in CLASSES and (given := re.search(r"Given value: ([\w.]+)$", message)):
        kind = "LightningModule" if key == "model" else "LightningDataModule"
        return f"{key}: {given[1]} is not the name of a {kind}."
    if unknown := re.search(r"(?:dot import path string: |has no attribute ')(\w+)", message):
        kind = key.rpartition(".")[2].removesuffix("s")
        hint = nearest(unknown[1], (known or {}).get(key, ())) or ": name one of Lightning, with its module."
        return f"{key}: Unknown {kind} {unknown[1]}{hint}"
    name = ""
    if problem := re.search(r"given class_path '([^']+)':\s*", message):
        name, message = problem[1].rpartition(".")[2], message[problem.end() :]
    if missing := re.search(r"(?:Requirement|No module named) '([\w-]+)", message):
        return f"{key}: {name or 'It'} needs the package {missing[1]}, which is not installed."
    reason = _reason(message)
    reason = reason if reason.endswith(".") else f"{reason}."
    if name:
        return f"{key}: {name} cannot be made: {reason}"
    return f"{key} {reason}" if reason.startswith("must be") else f"{key}: {reason}"


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
