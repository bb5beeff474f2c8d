"""The distributed PyTorch Lightning project to copy: MNIST, exact on any number of ranks."""

__version__ = "0.3.0.dev0"
