"""Trains, validates, tests and predicts: see `python train.py --help`."""

import os
import signal
import sys

# The imports take seconds: Ctrl-C during them needs no traceback.
signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from lit_mnist.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
