"""Trains, validates, tests and predicts: see `python train.py --help`."""

import sys

from lit_mnist.distributed.signals import STOP

# The imports take seconds: a signal during them ends the program as it does later, and Ctrl-C without a traceback.
STOP.listen()

from lit_mnist.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
