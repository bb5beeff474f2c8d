"""Hostile files for `test_hostile.py`."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Maker = Callable[[Path], None]
# The files refer to a module that creates a file when it is imported, and to a command that creates another file.
CANARY = "open('imported', 'w').close()\nclass Canary: pass\ndef call(*args, **kwargs): open('executed', 'w').close()\n"
TOUCH = "touch executed"
CREATE = "open('executed', 'w').close()"


class Reduced:
    """An object that is pickled as a call."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def archive(content: bytes, records: dict[str, bytes] | None = None, *, compressed: bool = False) -> bytes:
    """Returns what torch.save would write for pickled values."""
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as file:
        warnings.simplefilter("ignore")
        for name, value in {"archive/data.pkl": content, "archive/version": b"3\n", **(records or {})}.items():
            file.writestr(name, value)
    return buffer.getvalue()


def values(opcodes: bytes) -> Maker:
    """Returns a maker of an archive whose values are pickled with the given opcodes."""
    return whole(archive(b"\x80\x02" + opcodes + b"."))


def whole(content: bytes) -> Maker:
    return lambda path: path.write_bytes(content) and None


def later(make: Callable[[], Maker]) -> Maker:
    """Delays the creation of a large value, since the tests fork and copy their memory."""

    def made(path: Path) -> None:
        make()(path)

    return made


def saved(value: Any, **options: Any) -> Maker:
    def make(path: Path) -> None:
        torch.save(value() if callable(value) else value, path, **options)

    return make


def called(module: str, name: str, argument: bytes) -> Maker:
    return values(f"c{module}\n{name}\n".encode() + b"(" + argument + b"tR")


def tensor(*, count: int, offset: bytes, shape: bytes, record: bytes = bytes(40), times: int = 1) -> bytes:
    """Returns an archive with a float tensor that has the given fields."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    storage += b"J" + struct.pack("<i", count) + b"tQ"
    made = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + b"K\x01\x85\x89ccollections\nOrderedDict\n"
    )
    content = b"\x80\x02](" + made + b")RtRq\x00" + b"h\x00" * (times - 1) + b"e."
    return archive(content, {"archive/data/0": record})


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def jit(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def quantized() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"state_dict": {"weight": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}}


def sparse() -> dict[str, Any]:
    return {"state_dict": {"weight": torch.eye(3).to_sparse()}}


def tar(path: Path) -> None:
    """Torch's oldest format."""
    with tarfile.open(path, "w") as file:
        for name, content in {
            "pickle": pickle.dumps(Reduced(os.system, TOUCH), 2),
            "storages": b"",
            "tensors": b"",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))


def overlapping(path: Path) -> None:
    """A thousand entries that share one megabyte of the file."""
    content = archive(b"\x80\x02}.", {"archive/data/0": bytes(1 << 20)})
    end = content.rindex(b"PK\5\6")
    _, _, _, _, count, size, offset, _ = struct.unpack("<4s4H2LH", content[end:])
    entries = content[offset : offset + size]
    last = entries[entries.rindex(b"PK\1\2") :]
    more = b"".join(last.replace(b"archive/data/0", b"archive/data/%d" % (number % 9 + 1)) for number in range(1000))
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count + 1000, count + 1000, size + len(more), offset, 0)
    path.write_bytes(content[:offset] + entries + more + tail)


def two_lists(path: Path) -> None:
    """One archive after another: readers differ in whether offsets count from the first or the second one."""
    path.write_bytes(archive(b"\x80\x02cos\nsystem\n.") + archive(b"\x80\x02}."))


def contradicting_ends(path: Path) -> None:
    """An archive whose two ends, the short and the long one, have different lists of entries."""
    buffer = io.BytesIO()
    torch.save({"epoch": 1}, buffer)
    content = bytearray(buffer.getvalue())
    content[-98 + 24] ^= 1
    path.write_bytes(content)


def entries(**contents: bytes) -> Maker:
    return whole(archive(b"\x80\x02}.", {name.replace("__", "/"): content for name, content in contents.items()}))


def named_entries(*names: str) -> Maker:
    return whole(archive(b"\x80\x02}.", dict.fromkeys(names, pickle.dumps(Reduced(os.system, TOUCH), 2))))


def twice(path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as file:
        warnings.simplefilter("ignore")
        file.writestr("archive/data.pkl", b"\x80\x02}.")
        file.writestr("archive/data.pkl", pickle.dumps(Reduced(os.system, TOUCH), 2))


def very_long(path: Path) -> None:
    """A sparse file of 100 GB."""
    with path.open("wb") as file:
        file.truncate(100 << 30)


def encrypted(path: Path) -> None:
    content = bytearray(archive(b"\x80\x02}."))
    content[content.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(content)


def legacy(content: bytes) -> bytes:
    """Returns a file of the format before archives: a sequence of five pickles."""
    magic = 0x1950A86A20F9469CFC6C
    parts = [pickle.dumps(part, 2) for part in (magic, 1001, {"protocol_version": 1001, "little_endian": True})]
    return b"".join(parts) + content + pickle.dumps([], 2)


_LAUGHS = b"](K\x01e" + b"".join(b"q%c](" % level + b"h%c" % level * 9 + b"e" for level in range(12))
_TUPLES = b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(200))

CHECKPOINTS: dict[str, Maker] = {
    # Calls and imports.
    "os.system": saved({"callbacks": Reduced(os.system, TOUCH)}),
    "os.system in protocol 4": saved({"callbacks": Reduced(os.system, TOUCH)}, pickle_protocol=4),
    "exec": called("builtins", "exec", text(CREATE)),
    "eval": called("builtins", "eval", text(CREATE)),
    "exec of Python 2's name": called("__builtin__", "exec", text(CREATE)),
    "Popen": called("subprocess", "Popen", b"](" + text("touch") + text("executed") + b"e"),
    "import_module": called("importlib", "import_module", text("canary_module")),
    "a module's class": values(b"ccanary_module\nCanary\n"),
    "a module's function in callbacks": values(b"}" + text("callbacks") + b"ccanary_module\ncall\ns"),
    "INST": values(b"(" + text(TOUCH) + b"ios\nsystem\n"),
    "OBJ": values(b"(cos\nsystem\n" + text(TOUCH) + b"o"),
    "NEWOBJ": values(b"ccanary_module\nCanary\n)\x81"),
    "NEWOBJ_EX": values(b"ccanary_module\nCanary\n)}\x92"),
    "BUILD": values(b"ccollections\nOrderedDict\n)R}" + text("x") + b"K\x01sb"),
    "STACK_GLOBAL": values(b"\x8c\x02os\x8c\x06system\x93" + text(TOUCH) + b"\x85R"),
    "EXT1": values(b"\x82\x01"),
    "PERSID": values(b"P0\n"),
    "torch.load": called("torch", "load", text("/dev/zero")),
    "torch's loader of bytes": called("torch.storage", "_load_from_bytes", b"C\x04junk"),
    "a dotted name": called("torch", "os.system", text(TOUCH)),
    "a call of a storage": called("torch", "FloatStorage", number(10**12)),
    "torch.jit archive": jit,
    "code beside the values": named_entries("archive/code/__torch__.py", "archive/constants.pkl"),
    "legacy format": saved({"callbacks": Reduced(os.system, TOUCH)}, _use_new_zipfile_serialization=False),
    "legacy pickle": whole(legacy(pickle.dumps(Reduced(os.system, TOUCH), 2))),
    "plain pickle": whole(pickle.dumps(Reduced(os.system, TOUCH))),
    "tar": tar,
    # Exhausted memory, endless loops and stack overflows.
    "bytearray of a terabyte": called("builtins", "bytearray", number(10**12)),
    "entry 2 147 483 647 of the memo": values(b"}r\xff\xff\xff\x7f"),
    "entry of the memo as text": values(b"}p2147483647\n"),
    "a frame of exabytes": values(b"\x95" + b"\xff" * 7 + b"\x7f}"),
    "a text of gigabytes": values(b"X\xff\xff\xff\xff"),
    "bytes of exabytes": values(b"\x96" + b"\xff" * 7 + b"\x7f"),
    "shared lists": values(_LAUGHS),
    "shared tuples as a key": values(b"}" + _TUPLES + b"K\x01s"),
    "deep tuples as a key": later(lambda: values(b"})" + b"\x85" * 100_000 + b"K\x01s")),
    "deep lists": later(lambda: values(b"]" * 40_000 + b"a" * 39_999)),
    "deep dicts": later(lambda: values(b"}K\x01" * 20_000 + b"N" + b"s" * 20_000)),
    "a million lists": later(lambda: values(b"](" + b"]" * 8_000_000 + b"e")),
    "a text many times": later(lambda: values(b"](" + text("x" * 1_000_000) + b"q\x00" + b"h\x00" * 100_000 + b"e")),
    "20 MB of values": later(lambda: values(text("x" * 20_000_000))),
    "a number of 10 MB": later(lambda: values(b"\x8b" + struct.pack("<i", 10_000_000) + b"\x01" * 10_000_000)),
    "a number of a million digits": later(lambda: values(b"L" + b"9" * 1_000_000 + b"L\n")),
    "a list in itself": values(b"]q\x00h\x00a"),
    "a dict in itself": values(b"}q\x00" + text("x") + b"h\x00s"),
    "a tensor many times": later(
        lambda: whole(
            tensor(count=250_000, offset=b"K\0", shape=number(250_000) + b"\x85", record=bytes(10**6), times=100_000)
        )
    ),
    "a tensor with stride 0": saved({"state_dict": {"weight": torch.zeros(1).expand(10**9, 10**3)}}),
    "a storage longer than its record": whole(tensor(count=10**9, offset=b"K\0", shape=number(10**9) + b"\x85")),
    "a negative offset": whole(tensor(count=10, offset=number(-1), shape=b"K\x0a\x85")),
    "a negative shape": whole(tensor(count=10, offset=b"K\0", shape=number(-1) + b"\x85")),
    "a large offset": whole(tensor(count=10, offset=number(2**62), shape=b"K\x0a\x85")),
    "a tensor of 100 000 dimensions": later(
        lambda: whole(tensor(count=10, offset=b"K\0", shape=b"(" + b"K\x01" * 100_000 + b"t"))
    ),
    "a zip bomb": later(lambda: whole(archive(bytes(100_000_000), compressed=True))),
    "overlapping entries": overlapping,
    "70 000 entries": later(lambda: entries(**{f"archive__data__{number}": b"" for number in range(70_000)})),
    "a file of 100 GB": very_long,
    # Paths out of the archive, and archives with two interpretations.
    "absolute paths": named_entries("/tmp/executed", "archive/data/0"),
    "paths upwards": named_entries("archive/../../executed"),
    "two data.pkl": twice,
    "two data.pkl in folders": named_entries("archive/data.pkl.pkl", "other/data.pkl"),
    "two data.pkl but for capitals": named_entries("archive/DATA.PKL"),
    "two archives": two_lists,
    "an archive after a pickle": whole(legacy(pickle.dumps(Reduced(os.system, TOUCH), 2)) + archive(b"\x80\x02}.")),
    "an archive with a comment": lambda path: path.write_bytes(archive(b"\x80\x02}.")[:-2] + b"\x04\0PK\5\6") and None,
    "contradicting ends": contradicting_ends,
    "encrypted": encrypted,
    # Other kinds of tensors.
    "a sparse tensor": saved(sparse),
    "a quantized tensor": saved(quantized),
    "a numpy array": saved({"state_dict": {"weight": np.zeros(3)}}),
    "a whole module": saved(lambda: torch.nn.Linear(2, 2)),
    # Special, empty and truncated files.
    "a FIFO": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to the process's memory": lambda path: path.symlink_to("/proc/self/mem"),
    "an empty file": lambda path: path.touch(),
    "one byte": whole(b"P"),
    "22 bytes of an archive's end": whole(b"PK\5\6" + bytes(18)),
    "text": whole(b"not a checkpoint\n" * 100),
}


# Eleven lists, each with nine aliases of the previous one.
ALIASES = "[" + ",".join(f"&a{i} [{','.join([f'*a{i - 1}'] * 9) if i else 1}]" for i in range(11)) + "]"
