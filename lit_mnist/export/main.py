"""The command `export`: parses its words, imports the user's packages, and exports. A wrong flag imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from lit_mnist.distributed.terminal import print_line
from lit_mnist.export.flags import help_of_export, parse_export
from lit_mnist.run.imports import import_packages, split_imports


def main(words: Sequence[str], program: str) -> int:
    """Runs the command, and returns its exit code.

    Args:
        words: The words after `export`.
        program: Name of the program, for the help.

    Raises:
        InputError: The flags, the checkpoint or the file are wrong, or the file would give other logits.
    """
    if text := help_of_export(words, program):
        print_line(text)
        return 0
    packages, words = split_imports(words)
    request = parse_export(words)
    import_packages(packages)
    from lit_mnist.export.command import export

    export(request)
    return 0
