"""The parser's complaints in plain words, with what was probably meant."""

from __future__ import annotations

import re

from lit_mnist.cli.config_file import PACKAGES, ROOMS
from lit_mnist.cli.flags import SHORT_FLAGS
from lit_mnist.errors import nearest


def plain(message: str, keys: list[str], files: str) -> str:
    """Returns jsonargparse's complaint as one plain sentence or two."""
    if "Unexpected config" in message:
        return f"The configuration {files} holds no settings: it must be sections such as model: or data:."
    if found := re.search(r"unrecognized arguments: (\S+)", message, re.IGNORECASE):
        flag = found[1].partition("=")[0]
        return f"Unknown flag {flag}{nearest(flag, [f'--{key}' for key in keys] + list(SHORT_FLAGS))}"
    if found := re.search(r"Group '(\S+)' does not accept option '(\S+)'", message):
        return f"Unknown key {found[1]}.{found[2]}{nearest(f'{found[1]}.{found[2]}', keys)}"
    if found := re.search(r"Option '(\S+)' is not accepted", message):
        return f"Unknown key {found[1]}{nearest(found[1], keys)}"
    found = re.match(r'Parser key "([^"]+)":\s*', message)
    if not found:
        return " ".join(message.split())
    key, rest = {"model.seed": "seed_everything"}.get(found[1], found[1]), message[found.end() :]
    if denied := re.search(r"Importing '([^']+)' is not allowed", rest):
        of = f", and of these {', '.join(ROOMS)}" if denied[1].partition(".")[0] in PACKAGES else ""
        return f"{key} names {denied[1]}: a configuration may name classes of {', '.join(PACKAGES)} only{of}."
    if problem := re.search(r"given class_path '([^']+)':\s*(.+?)(?:\n\s*-|\n\s*Given|$)", rest, re.DOTALL):
        return f"{key}: {problem[1]} cannot be made: {' '.join(problem[2].split())}"
    if given := re.search(r"(?:Got value|Given value): (.*)", rest, re.DOTALL):
        expected = " ".join(re.findall(r"Expected a.*|Subtypes.*", rest))
        kinds = re.findall(r"<class '(\w+)'>|Literal(\[[^\]]*\])", expected)
        names = dict.fromkeys(kind or literal.strip("[]") for kind, literal in kinds)
        wanted = " or ".join({"str": "text"}.get(name, name) for name in names if name != "NoneType")
        if key == "seed_everything":
            wanted = "an integer from 0"
        return f"{key} must be {wanted or 'something else'}, but is {' '.join(given[1].split())[:100]}."
    return f"{key}: {' '.join(rest.split())}"
