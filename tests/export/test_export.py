"""Exported files give the logits of the network, and nothing is written otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Program, run_forked
from safetensors import safe_open

from lit_mnist.data.digits.mnist import load_mnist
from lit_mnist.export import command
from lit_mnist.predict.trained import load, load_net

if find_spec("onnxruntime") is None:
    pytest.skip("onnxruntime is not installed (the extra `export`)", allow_module_level=True)

SMALL = ("--data.train_size", 320, "--data.val_size", 100, "--data.test_size", 100, "--run.threads", 1)
FORMATS = ("safetensors", "onnx", "pt2")


@pytest.fixture(scope="module")
def run(shared_program: Program) -> Path:
    return shared_program.train(*SMALL, "--lr", 0.01, "--epochs", 2)


def in_fork(work: Callable[[], object], folder: Path) -> None:
    """Runs a part of a test in a process of its own: ONNX Runtime starts threads, and the tests fork this one."""

    def run() -> int:
        work()
        return 0

    done = run_forked(run, folder)
    assert done.code == 0, done.err


def logits_of(file: Path, pixels: torch.Tensor) -> torch.Tensor:
    """Computes logits as the page about exports shows."""
    if file.suffix == ".pt2":
        return torch.export.load(file).module()(pixels).detach()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    return torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])


@pytest.mark.parametrize("form", ["safetensors", "onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_an_export_predicts_what_the_network_predicts(program: Program, run: Path, form: str) -> None:
    file = program.folder / f"net.{form}"
    done = program("export", "--ckpt", run, "--to", form, "--output", file)
    assert done.code == 0, done.err
    assert "largest difference" in done.out
    # Not the number of images that the export was compared on.
    images = load_mnist(None)[3].images[100:107]

    def check_logits() -> None:
        logits = logits_of(file, images.unsqueeze(1).float())
        assert logits.shape == (7, 10)
        assert torch.equal(logits.argmax(1), load(run).predict(images)[0])
        assert len(logits.argmax(1).unique()) > 1

    def check_weights() -> None:
        net, _, _ = load_net(run / "checkpoints" / "best.ckpt")
        with safe_open(file, "pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
        assert all(torch.equal(weights[name], tensor) for name, tensor in net.state_dict().items())
        assert json.loads(metadata["classes"]) == list("0123456789")
        assert json.loads(metadata["mean"]) == [0.1307]

    in_fork(check_weights if form == "safetensors" else check_logits, program.folder)


@pytest.mark.slow
def test_the_python_lines_of_the_page_run(program: Program, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in FORMATS:
        assert program("export", "--ckpt", run, "--to", form, "--output", f"digits.{form}").code == 0
    (program.folder / "runs").mkdir()
    (program.folder / "runs" / "small").symlink_to(run)
    monkeypatch.chdir(program.folder)
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL | re.MULTILINE)
    in_fork(lambda: exec(compile(block, "docs/export.md", "exec"), {}), program.folder)  # noqa: S102


@pytest.mark.slow
def test_onnx_and_pt2_contain_the_class_names(program: Program, run: Path) -> None:
    for form in ("onnx", "pt2"):
        assert program("export", "--ckpt", run, "--to", form).code == 0

    def check() -> None:
        import onnx

        properties = {prop.key: prop.value for prop in onnx.load(program.folder / "best.onnx").metadata_props}
        extra = {"classes": "", "input": ""}
        torch.export.load(program.folder / "best.pt2", extra_files=extra)
        for found in (properties, extra):
            assert json.loads(found["classes"]) == list("0123456789")
            assert "[batch, 1, 28, 28]" in found["input"]

    in_fork(check, program.folder)


@pytest.mark.slow
def test_basicnet_is_exported(program: Program) -> None:
    folder = program.train("--model.net", "basicnet", *SMALL)
    for form in FORMATS:
        done = program("export", "--ckpt", folder, "--to", form)
        assert done.code == 0, done.err


@pytest.mark.slow
def test_a_registered_network_is_exported(program: Program) -> None:
    flags = ("--import", "examples.registered_network")
    folder = program.train(*flags, "--config", Path("examples/registered_network/stripes.yaml").resolve())
    done = program("export", *flags, "--ckpt", folder, "--to", "pt2")
    assert done.code == 0, done.err
    assert program("export", "--ckpt", folder, "--to", "onnx").code == 2


def test_a_file_with_other_logits_is_not_kept(program: Program, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = command.FORMATS["pt2"]
    monkeypatch.setitem(command.FORMATS, "pt2", (write, lambda exported, path: read(exported, path) + 0.01))
    done = program("export", "--ckpt", run, "--to", "pt2")
    assert done.code == 2
    assert "differ from those of the network by up to 1.0e-02" in done.err
    assert not list(program.folder.glob("**/*pt2*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "pickle"), "not a format: use safetensors, onnx, pt2"),
        ((), "export needs --to"),
        (("--to", "pt2", "--fast", "1"), "Unknown flag --fast"),
        (("--to", "pt2", "--output", "there.pt2"), "there.pt2 exists"),
        (("--to", "pt2", "--output", "no/folder.pt2"), "no folder no"),
    ],
)
def test_a_wrong_export_is_rejected(program: Program, run: Path, words: tuple[str, ...], message: str) -> None:
    (program.folder / "there.pt2").write_text("mine")
    done = program("export", "--ckpt", run, *words)
    assert done.code == 2
    assert message in done.err
    assert (program.folder / "there.pt2").read_text() == "mine"


def test_a_missing_or_damaged_run_is_rejected(program: Program, run: Path) -> None:
    assert program("export", "--ckpt", "nowhere", "--to", "pt2").code == 2
    damaged = program.folder / "damaged.ckpt"
    content = bytearray((run / "checkpoints" / "best.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = program("export", "--ckpt", damaged, "--to", "pt2")
    assert (done.code, "damaged" in done.err) == (2, True), done.err
