"""Trains MNIST: `python train.py --devices 2`. See `python train.py --help`, and `lit_mnist/cli.py`."""

from lit_mnist.cli import main

if __name__ == "__main__":
    main()
