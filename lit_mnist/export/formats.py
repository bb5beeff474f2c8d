"""The formats of an export: each writes a file, and computes the logits of images with that file alone."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lit_mnist.errors import InputError
from lit_mnist.export.network import Exported

Writer = Callable[[Exported, Path], None]
Reader = Callable[[Exported, Path], torch.Tensor]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what the exporters print about their progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _write_safetensors(exported: Exported, path: Path) -> None:
    save_file(exported.net.net.state_dict(), path, metadata={"format": "pt", **exported.metadata})


def _read_safetensors(exported: Exported, path: Path) -> torch.Tensor:
    net = copy.deepcopy(exported.net)
    for parameter in net.net.parameters():
        torch.nn.init.zeros_(parameter)
    net.net.load_state_dict(load_file(path))
    return _logits(net, exported.pixels)


def _write_pt2(exported: Exported, path: Path) -> None:
    with _quiet():
        program = torch.export.export(exported.net, (exported.pixels,), dynamic_shapes=({0: _batch()},))
        torch.export.save(program, path, extra_files=exported.metadata)


def _read_pt2(exported: Exported, path: Path) -> torch.Tensor:
    with _quiet():
        return _logits(torch.export.load(path).module(), exported.pixels)


def _write_onnx(exported: Exported, path: Path) -> None:
    _require_onnx()
    import onnx

    with _quiet():
        program = torch.onnx.export(
            exported.net,
            (exported.pixels,),
            dynamo=True,
            dynamic_shapes=({0: _batch()},),
            input_names=["pixels"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, exported.metadata)
    onnx.save(model, path)


def _read_onnx(exported: Exported, path: Path) -> torch.Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"pixels": exported.pixels.numpy()})[0])


def _require_onnx() -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise InputError(f"--to onnx needs {error.name}: pip install onnx onnxruntime onnxscript") from error
    del onnx, onnxruntime, onnxscript


def _batch() -> torch.export.Dim:
    return torch.export.Dim("batch", min=1)


@torch.no_grad()
def _logits(net: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = net(pixels)
    return logits


FORMATS: dict[str, tuple[Writer, Reader]] = {
    "safetensors": (_write_safetensors, _read_safetensors),
    "onnx": (_write_onnx, _read_onnx),
    "pt2": (_write_pt2, _read_pt2),
}
