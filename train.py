"""Trains, validates, tests and predicts: see `python train.py --help`."""

import sys

# A checkout is used without pip, which rejects an older Python.
if sys.version_info < (3, 11):  # noqa: UP036
    print("error: lit_mnist needs Python 3.11 or newer, but this is {}.{}.".format(*sys.version_info), file=sys.stderr)
    sys.exit(2)

from lit_mnist.cli.entry import entry

if __name__ == "__main__":
    entry()
