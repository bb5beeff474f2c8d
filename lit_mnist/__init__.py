"""The distributed PyTorch Lightning project to copy: MNIST, exact on any number of ranks."""

import gc

# Nothing that is imported becomes garbage. To search it takes a fifth of the imports, and a fourteenth of a short run.
gc.disable()
try:
    from lit_mnist.datamodule import MNISTDataModule
    from lit_mnist.module import LitClassifier
    from lit_mnist.trainer import LitTrainer
finally:
    gc.enable()
    gc.freeze()

__all__ = ["LitClassifier", "LitTrainer", "MNISTDataModule"]
__version__ = "0.3.0.dev0"
