"""The undocumented content of a file of torch.save.

A change in torch is detected by `test_a_checkpoint_round_trip_is_exact` and
`test_torch_s_own_files_pass_the_safety_check` in tests/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import re

import torch

# The archive's record with the pickled values. A tensor's bytes are in the record `data/KEY`.
VALUES_RECORD = "data.pkl"
TENSOR_RECORD = re.compile(r"data/(\d{1,6})", re.ASCII)
# Records that torch executes or unpickles in other kinds of archives.
_CODE = re.compile(r"code/.*|.*\.(?:pkl|pickle|py|pyc)", re.ASCII | re.IGNORECASE)
_RECORD = re.compile(r"(?:(?!\.{1,2}/)[\w.-]+/)*(?!\.{1,2}$)[\w.-]+", re.ASCII)

# An attribute of a network's state_dict: the versions of its layers.
VERSIONS = "_metadata"
# Bytes per element of each type of storage.
ITEM_SIZES = {
    f"torch.{name}Storage": getattr(torch, dtype).itemsize
    for name, dtype in (
        ("Float", "float32"),
        ("Double", "float64"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Long", "int64"),
        ("Int", "int32"),
        ("Short", "int16"),
        ("Char", "int8"),
        ("Byte", "uint8"),
        ("Bool", "bool"),
        ("ComplexFloat", "complex64"),
        ("ComplexDouble", "complex128"),
    )
} | {"torch.storage.UntypedStorage": 1}
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# The functions of a pickled tensor.
MAKE_TENSOR = "torch._utils._rebuild_tensor_v2"
MAKE_TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v3"
MAKE_TENSOR_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
MAKE_DICT, MAKE_COUNTER, MAKE_SET = "collections.OrderedDict", "collections.Counter", "builtins.set"
# The types of tensors.
TENSOR_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
# Functions that add a few attributes to their tensors.
OF_TENSORS = {
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor",
}
# Classes of small values, made of numbers or texts.
OF_NUMBERS = {"builtins.complex", "torch.Size", "torch.device", "torch.serialization._get_layout"}
# Both make bytes of a text. With a number, they would allocate as many bytes.
OF_TEXT = {"builtins.bytearray": "latin-1", "_codecs.encode": "latin1"}


def allowed_globals() -> set[str]:
    """Returns the names that the user has allowed with `torch.serialization.add_safe_globals`."""
    found = set[str]()
    for value in torch.serialization.get_safe_globals():
        found.add(value[1] if isinstance(value, tuple) else f"{value.__module__}.{value.__qualname__}")
    return found


def is_harmless_record(name: str) -> bool:
    """Returns whether a record is neither code nor a path out of the archive. Newer releases of torch add records."""
    return name == VALUES_RECORD or (_RECORD.fullmatch(name) is not None and _CODE.fullmatch(name) is None)
