"""The flags and the help of the command `export`. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.errors import InputError, nearest
from lit_mnist.run.help_text import HELP_FLAGS, help_topic, paragraph, row

# The formats with the suffix of their files.
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "pt2": ".pt2"}
_ABOUT = (
    "Writes the best weights of a run for other programs. The file is kept only if it gives the logits of the network."
)
FLAGS = {
    "--ckpt": "a run folder or a checkpoint",
    "--to": "safetensors: the weights alone; onnx: the network with its normalization, for ONNX Runtime and others; "
    "pt2: the same as an exported program of torch.export",
    "--output": "the file; by default, the checkpoint's name with the format's suffix, in the current folder",
}
_IMPORT = "the packages with your networks"
_EXIT_CODES = "exit codes: 0 written; 2 the input is rejected, or the file would give other logits"


@dataclass(frozen=True)
class Request:
    """What is exported: a run folder or checkpoint, the format, and the file or None."""

    place: Path
    form: str
    output: Path | None


def help_of_export(words: Sequence[str], program: str) -> str:
    """Returns the help if the flags ask for it, otherwise nothing."""
    if help_topic(words) is None:
        return ""
    usage = paragraph(f"usage: {program} export --ckpt RUN --to FORMAT [--output FILE]", "  ")
    lines = [usage, "", paragraph(_ABOUT), "", "flags:"]
    lines += [row(flag, meaning) for flag, meaning in {**FLAGS, "--import": _IMPORT}.items()]
    return "\n".join([*lines, "", paragraph(_EXIT_CODES)])


def parse_export(words: Sequence[str]) -> Request:
    """Returns what the words after `export` ask for.

    Raises:
        InputError: A flag is unknown, is given twice, lacks its value, or is missing.
    """
    values: dict[str, str] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            raise InputError(f"export takes no argument {flag}. A run or a checkpoint is given as --ckpt {flag}.")
        if flag not in FLAGS:
            hint = nearest(flag, [*FLAGS, "--import", *HELP_FLAGS])
            raise InputError(f"Unknown flag {flag}{hint or ': export has --ckpt, --to, --output and --import.'}")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if not value or flag in values:
            raise InputError(f"{flag} needs one value.")
        values[flag] = value
    for flag, wanted in (("--ckpt", "a run folder or a checkpoint"), ("--to", " or ".join(SUFFIXES))):
        if flag not in values:
            raise InputError(f"export needs {flag}: {wanted}.")
    if values["--to"] not in SUFFIXES:
        hint = nearest(values["--to"], SUFFIXES) or f": use {', '.join(SUFFIXES)}."
        raise InputError(f"--to {values['--to']!r} is not a format{hint}")
    output = Path(values["--output"]).expanduser() if "--output" in values else None
    return Request(Path(values["--ckpt"]).expanduser(), values["--to"], output)
