"""The distributed PyTorch Lightning project to copy: MNIST, exact on any number of ranks."""

import gc

# Nothing that is imported becomes garbage: looking for it takes a fifth of the imports' time.
_was_enabled = gc.isenabled()
gc.disable()
try:
    from lit_mnist.datamodule import MNISTDataModule
    from lit_mnist.module import LitClassifier
    from lit_mnist.trainer import LitTrainer
finally:
    if _was_enabled:
        gc.enable()

__all__ = ["LitClassifier", "LitTrainer", "MNISTDataModule"]
__version__ = "0.3.0.dev0"
