"""Trains, validates, tests and predicts: see `python train.py --help`."""

import sys

# A checkout is used without pip, which rejects an older Python.
if sys.version_info < (3, 11):  # noqa: UP036
    print("error: lit_mnist needs Python 3.11 or newer, but this is {}.{}.".format(*sys.version_info), file=sys.stderr)
    sys.exit(2)

from lit_mnist.distributed.signals import STOP

# The imports take seconds: a signal during them ends the program as it does later, and Ctrl-C without a traceback.
STOP.listen()

from lit_mnist.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
