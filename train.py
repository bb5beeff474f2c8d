"""Trains MNIST: `python train.py --devices 2`. See `python train.py --help`, and `lit_mnist/cli.py`."""

import gc

gc.disable()  # until the command begins: nothing that is imported becomes garbage
from lit_mnist.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
