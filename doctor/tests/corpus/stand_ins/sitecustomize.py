"""Lets programs that were written for older libraries, or for data sets with known digests, run on current ones.

Python imports it at its start, because the folder is on PYTHONPATH. It restores names that torch, torchvision and NumPy
have removed, and views that torch has accepted, and lets torchvision accept a data set in the form of CIFAR that does
not have its digest.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType


def _torch(torch):
    six = ModuleType("torch._six")
    six.inf, six.nan, six.string_classes, six.container_abcs = float("inf"), float("nan"), (str, bytes), _containers()
    six.int_classes = int
    torch._six = sys.modules["torch._six"] = six
    torch.Tensor.view = _view(torch.Tensor.view)
    torch.utils.data.Sampler.__init__ = lambda self, data_source=None: None


def _view(view):
    """A comparison kept the memory format of its first argument in torch 1.6, so that more views were possible."""

    def viewed(self, *shape):
        try:
            return view(self, *shape)
        except RuntimeError:
            return self.reshape(*shape)

    return viewed


def _containers():
    import collections.abc

    return collections.abc


def _digests(module):
    module.check_md5 = lambda fpath, md5, **kwargs: True


def _image_grids(module):
    make_grid = module.make_grid

    def renamed(tensor, *args, range=None, **kwargs):  # noqa: A002
        return make_grid(tensor, *args, **({"value_range": range} if range else {}), **kwargs)

    module.make_grid = renamed


def _numpy(numpy):
    for name, kind in (("float", float), ("int", int), ("bool", bool), ("object", object)):
        if name not in vars(numpy):
            setattr(numpy, name, kind)


_CHANGES = {
    "torch": _torch,
    "torchvision.datasets.utils": _digests,
    "torchvision.utils": _image_grids,
    "numpy": _numpy,
}


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes a module after its import."""

    def __init__(self):
        self.loaders = {}

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _CHANGES or fullname in self.loaders:
            return None
        self.loaders[fullname] = None
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self.loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module):
        loader = self.loaders[module.__name__]
        module.__spec__.loader = module.__loader__ = loader
        loader.exec_module(module)
        _CHANGES[module.__name__](module)


sys.meta_path.insert(0, _After())
