"""Trains, validates, tests and predicts: see `python train.py --help`."""

import sys

from lit_mnist.cli import main

if __name__ == "__main__":
    sys.exit(main())
