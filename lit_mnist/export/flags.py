"""The flags and the help of the command `export`. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.errors import InputError

# The formats with the suffix of their files.
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "pt2": ".pt2"}
HELP = """\
usage: {program} export --ckpt RUN --to FORMAT [--output FILE]

Writes the best weights of a run for other programs. The file is kept only if it gives the logits of the network.

flags:
  --ckpt    a run folder or a checkpoint
  --to      safetensors: the weights alone
            onnx: the network with its normalization, for ONNX Runtime and others
            pt2: the same as an exported program of torch.export
  --output  the file; by default, the checkpoint's name with the format's suffix, in the current folder
  --import  the packages with networks of your own

exit codes: 0 written; 2 the input is rejected, or the file would give other logits
"""


@dataclass(frozen=True)
class Request:
    """What is exported: a run folder or checkpoint, the format, and the file or None."""

    place: Path
    form: str
    output: Path | None


def help_of_export(words: Sequence[str], program: str) -> str:
    """Returns the help if the flags ask for it, otherwise nothing."""
    return HELP.format(program=program) if {"--help", "-h"} & set(words) else ""


def parse_export(words: Sequence[str]) -> Request:
    """Returns what the words after `export` ask for.

    Raises:
        InputError: A flag is unknown, is given twice, lacks its value, or is missing.
    """
    values: dict[str, str] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in {"--ckpt", "--to", "--output"}:
            raise InputError(f"export does not know {flag}: its flags are --ckpt, --to, --output and --import.")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if not value or flag in values:
            raise InputError(f"{flag} needs one value.")
        values[flag] = value
    for flag, wanted in (("--ckpt", "a run folder or a checkpoint"), ("--to", " or ".join(SUFFIXES))):
        if flag not in values:
            raise InputError(f"export needs {flag}: {wanted}.")
    if values["--to"] not in SUFFIXES:
        raise InputError(f"--to {values['--to']!r} is not a format: use {', '.join(SUFFIXES)}.")
    output = Path(values["--output"]).expanduser() if "--output" in values else None
    return Request(Path(values["--ckpt"]).expanduser(), values["--to"], output)
