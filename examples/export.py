"""Export the network of a trained run: safetensors, torch.export and, if onnx is installed, ONNX.

    python train.py --run-dir runs/first
    python -m examples.export runs/first/checkpoints/best.ckpt exported

safetensors holds the weights alone, and every framework reads it. torch.export holds the computation: PyTorch runs it
without this project's code. ONNX runs without PyTorch. In both, the number of images is free. Each file is read again,
and must give the logits of the network.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lit_mnist.module import LitClassifier


def main(checkpoint: Path, folder: Path) -> None:
    """Exports to model.safetensors, model.pt2 and model.onnx of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # A file that somebody else has made executes nothing.
    module = LitClassifier.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    net = module.net.eval()
    images = torch.rand(3, 1, 28, 28)
    expected = net(images).detach()
    dynamic = ({0: torch.export.Dim.DYNAMIC},)

    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, path)
    net.load_state_dict(load_file(path))
    torch.testing.assert_close(net(images), expected)
    print(path)

    path = folder / "model.pt2"
    torch.export.save(torch.export.export(net, (torch.rand(2, 1, 28, 28),), dynamic_shapes=dynamic), path)
    torch.testing.assert_close(torch.export.load(path).module()(images), expected)
    print(path)

    if all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        import onnxruntime

        path = folder / "model.onnx"
        torch.onnx.export(net, (torch.rand(2, 1, 28, 28),), path, dynamic_shapes=dynamic, input_names=["images"])
        (logits,) = onnxruntime.InferenceSession(path).run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
