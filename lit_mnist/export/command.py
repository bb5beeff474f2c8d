"""The command `export`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from lit_mnist.checkpoint.format import find_weights
from lit_mnist.distributed.terminal import print_labelled, print_line
from lit_mnist.errors import InputError
from lit_mnist.export.flags import SUFFIXES, Request
from lit_mnist.export.formats import FORMATS
from lit_mnist.export.network import Exported, load_exported

# Largest difference of the logits in float32, relative to the largest logit if that is above 1.
TOLERANCE = 1e-5
_USE = {
    "safetensors": 'safetensors.torch.load_file("{}"), and net.load_state_dict(...)',
    "onnx": 'onnxruntime.InferenceSession("{}").run(["logits"], {{"pixels": pixels}})',
    "pt2": 'torch.export.load("{}").module()(pixels)',
}


def export(request: Request) -> None:
    """Exports a network.

    Raises:
        InputError: The checkpoint or the file is wrong, or the file would give other logits.
    """
    path = find_weights(request.place, print_line)
    output = request.output or Path(f"{path.stem}{SUFFIXES[request.form]}")
    _check_output(output)
    exported = load_exported(path)
    difference = _write(exported, request, output)
    print_labelled("network", f"{exported.metadata['network']} of {path}")
    print_labelled("written", f"{output} ({output.stat().st_size:,} bytes)")
    print_labelled("compared", f"largest difference of the logits {difference:.1e}, on {len(exported.pixels)} images")
    if request.form != "safetensors":
        print_labelled("input", exported.metadata["input"])
    print_labelled("use", _USE[request.form].format(output))


def _check_output(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise InputError(f"{output} exists: choose another --output, or remove it.")
    if not output.parent.is_dir():
        raise InputError(f"There is no folder {output.parent} for {output.name}.")


def _write(exported: Exported, request: Request, output: Path) -> float:
    """Writes and compares the file, which appears under its name only if the logits are equal."""
    write, read = FORMATS[request.form]
    with torch.no_grad():
        expected = exported.net(exported.pixels)
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            temporary = Path(folder) / output.name
            write(exported, temporary)
            found = read(exported, temporary)
            difference = float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")
            allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
            if not difference <= allowed:
                raise InputError(
                    f"{output} was not written: its logits differ from those of the network by up to {difference:.1e}, "
                    f"and {allowed:.1e} is allowed."
                )
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            # Fails if the file has been created meanwhile, unlike a rename.
            os.link(temporary, output)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}.") from error
    return difference
