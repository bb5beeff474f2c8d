"""A configuration file with every option, its default and its help.

python -m lit_mnist.experiment.reference > configs/all-options.yaml
"""

from __future__ import annotations

import sys
import textwrap

import yaml

from lit_mnist.experiment.schema import Option, builtin_options

_HEAD = """\
# Every option with its default, written by: python -m lit_mnist.experiment.reference > configs/all-options.yaml
# Copy the lines that you change into your own file; default.yaml has those that matter most.
"""


def reference() -> str:
    """Returns the text of `configs/all-options.yaml`."""
    lines = [_HEAD]
    section = ""
    for option in builtin_options().values():
        head, _, name = option.key.rpartition(".")
        if head != section:
            section = head
            lines.append(f"\n{section}:")
        lines += _entry(option, name, "  " if head else "")
    return "\n".join(lines) + "\n"


def _entry(option: Option, name: str, indent: str) -> list[str]:
    text = f"{option.help} [{option.wanted}]"
    comment = textwrap.wrap(text, 120, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")
    value = yaml.safe_dump(option.default).splitlines()[0]
    return [*comment, f"{indent}{name}: {value}"]


if __name__ == "__main__":
    sys.stdout.write(reference())
