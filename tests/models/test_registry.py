"""Registered networks and data sets: what is accepted, and the message for each wrong one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHILD_ENV, Program
from PIL import Image
from processes import assert_rejected
from torch import nn

from lit_mnist import LitClassifier, MNISTDataModule, SeededDropout, register_dataset, register_network
from lit_mnist.cli.request import parse
from lit_mnist.data.dataset import load_dataset
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, ModelSettings
from lit_mnist.experiment.registry import DATASETS, NETWORKS
from lit_mnist.experiment.schema import options
from lit_mnist.models.build import build_net


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    yield
    for known in (NETWORKS, DATASETS):
        known.clear()


def build(num_classes: int = 3, **settings: Any) -> nn.Module:
    return build_net(ModelSettings(net="own", **settings), num_classes=num_classes, seed=1)  # type: ignore[arg-type]


class Linear(nn.Module):
    """A valid network; the wrong ones below change one part of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(784, num_classes)
        self.more(num_classes)

    def more(self, num_classes: int) -> None:
        """Adds layers."""

    def forward(self, images: torch.Tensor, rng: Any) -> torch.Tensor:
        return self.after(self.fc(images.flatten(1)), rng)

    def after(self, logits: torch.Tensor, rng: Any) -> torch.Tensor:
        return logits


def after(
    change: Callable[[Any, torch.Tensor, Any], Any], more: Callable[[Any], None] = lambda _: None
) -> type[Linear]:
    """Returns a network that changes the logits by a function, and has more layers."""
    return type("Changed", (Linear,), {"after": change, "more": lambda net, _: more(net)})


def more(layers: Callable[[Any], None]) -> type[Linear]:
    return after(lambda net, logits, rng: logits, layers)


def counted(net: Any, logits: torch.Tensor, _rng: Any) -> torch.Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return logits + net.calls


def drawn(_net: Any, logits: torch.Tensor, rng: Any) -> torch.Tensor:
    """Draws its own numbers for the samples of this rank, without looking at their rows."""
    generator = torch.Generator().manual_seed(rng.number if rng else 0)
    return logits + torch.randn(logits.shape, generator=generator)


def own(net: Any) -> None:
    net.scale = nn.Parameter(torch.ones(1))


def lstm(net: Any) -> None:
    net.lstm = nn.LSTM(3, 3, num_layers=2, dropout=0.5, batch_first=True)


class NoForward(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(784, num_classes)


class ImagesOnly(Linear):
    def forward(self, images: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.fc(images.flatten(1))


NETS: dict[str, tuple[Any, list[str]]] = {
    "no module": (lambda num_classes: "net", ["returns a str", "return a torch.nn.Module"]),
    "a module class": (lambda num_classes: nn.Linear, ["returns a type"]),
    "an error when it is built": (
        lambda num_classes: nn.Linear(1, -1),
        ["fails: RuntimeError", "test_registry.py, line"],
    ),
    "no forward": (NoForward, ["its forward(images, rng)", "NotImplementedError"]),
    "no rng": (ImagesOnly, ["must have forward(self, images, rng)", "too many positional arguments"]),
    "an error in forward": (after(lambda net, x, rng: x @ x), ["its forward(images, rng) fails: RuntimeError", "line"]),
    "no parameters": (more(lambda net: net.fc.requires_grad_(False)), ["no parameters to train"]),
    "nn.Dropout": (more(lambda net: setattr(net, "drop", nn.Dropout(0.1))), ["drop is an nn.Dropout", "SeededDropout"]),
    "dropout within a layer": (
        more(lambda net: setattr(net, "encoder", nn.TransformerEncoderLayer(4, 1))),
        ["encoder.dropout is an nn.Dropout", "lit_mnist.SeededDropout"],
    ),
    "dropout by a function": (after(lambda net, x, rng: F.dropout(x)), ["torch's global generator", "SeededDropout"]),
    "dropout of an LSTM": (after(lambda net, x, rng: x + net.lstm(x[:, None])[0][:, 0], lstm), ["torch's global gene"]),
    "Python's generator": (after(lambda net, x, rng: x * random.random()), ["Python's global generator"]),
    "NumPy's generator": (after(lambda net, x, rng: x * np.random.rand()), ["NumPy's global generator"]),
    "the same number twice": (
        more(lambda net: setattr(net, "drops", nn.ModuleList([SeededDropout(0.5, 1), SeededDropout(0.5, 1)]))),
        ["drops.0 and drops.1", "own number"],
    ),
    "another shape": (after(lambda net, x, rng: x[:, :2]), ["[4, 2] for 4 images and 3 classes", "shape [4, 3]"]),
    "squeezed": (after(lambda net, x, rng: x.squeeze()), ["[3] for 1 images", "shape [1, 3]"]),
    "classes": (after(lambda net, x, rng: x.argmax(1)), ["torch.int64 [4]", "floating-point logits"]),
    "a tuple": (after(lambda net, x, rng: (x, x)), ["returns a tuple", "one tensor"]),
    "NaN": (after(lambda net, x, rng: x * float("nan")), ["infinite values or NaN"]),
    "an unused parameter": (more(own), ["parameter scale gets no gradient", "requires_grad=False"]),
    "a detached layer": (after(lambda net, x, rng: x.detach() * net.scale, own), ["parameter fc.", "no gradient"]),
    "a state of its own": (after(counted), ["different logits for the same images"]),
    "weights of no seed": (
        more(lambda net: nn.init.constant_(net.fc.bias, random.SystemRandom().random())),
        ["initial fc.bias is not a function of the seed"],
    ),
    "a lazy layer": (more(lambda net: setattr(net, "lazy", nn.LazyLinear(3))), ["lazy.weight", "no lazy layers"]),
    "the mean of the batch": (after(lambda net, x, rng: x - x.mean(0)), ["other images are in the batch"]),
    "random numbers without rows": (after(drawn), ["other images are in the batch", "SeededDropout"]),
    "another batch norm": (
        more(lambda net: setattr(net, "norm", nn.SyncBatchNorm(3))),
        ["norm is a SyncBatchNorm", "nn.BatchNorm1d, 2d or 3d"],
    ),
}


@pytest.mark.parametrize("case", NETS)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_wrong_network_is_rejected_with_what_to_change(case: str) -> None:
    make, parts = NETS[case]
    register_network("own")(make)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    with pytest.raises(InputError) as error:
        build()
    message = str(error.value)
    assert message.startswith("model.net own: ")
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message, message
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


class Good(nn.Module):
    """Batch norm of two kinds, tied weights, a frozen parameter, a buffer, dropout and a layer without dropout."""

    def __init__(self, num_classes: int, *, dropout: float = 0.1, views: int = 1) -> None:
        super().__init__()
        self.views = views
        self.conv = nn.Conv2d(1, 8, 7, stride=7)
        self.norm = nn.Sequential(nn.BatchNorm2d(8), nn.Flatten(), nn.BatchNorm1d(128), nn.Dropout(0.0))
        self.dropout = SeededDropout(dropout, layer=1)
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(128, 128))
        self.fc = nn.Linear(128, num_classes)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, images: torch.Tensor, rng: Any) -> torch.Tensor:
        x = self.norm(self.conv(images))
        return self.fc(self.inner(self.dropout(x, rng))) * self.scale * self.frozen


def test_a_valid_network_is_built_from_the_seed_alone() -> None:
    register_network("own")(Good)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = build(dropout=0.3, views=5), build(dropout=0.3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert isinstance(first, Good)
    assert (first.dropout.rate, first.views) == (0.3, 5)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    with torch.device("meta"):
        assert {tensor.device.type for tensor in build().state_dict().values()} == {"cpu"}
    module = LitClassifier(3, net="own").eval()
    assert module(torch.zeros(2, 1, 28, 28)).shape == (2, 3)


NAMES = {
    "a built-in name": ("convnet", "a name of the project"),
    "a path": ("my.net", "letters, digits and underscores"),
    "empty": ("", "letters, digits and underscores"),
    "a number": (3, "letters, digits and underscores"),
    "no parentheses": (Linear, '@register_network("mine")'),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_wrong_name_is_rejected_at_registration(case: str) -> None:
    name, part = NAMES[case]
    with pytest.raises(InputError, match=part.replace("(", r"\(").replace(")", r"\)")):
        register_network(name)(Linear)
    assert not NETWORKS


def test_what_cannot_be_called_so_is_rejected_at_registration() -> None:
    for make, part in (
        (lambda: None, "must accept (num_classes, dropout=..., views=...)"),
        (lambda num_classes, width: None, "missing a required argument: 'width'"),
        (nn.Linear(1, 1), "register a class or a function"),
    ):
        with pytest.raises(InputError) as error:
            register_network("own")(make)  # type: ignore[type-var]
        assert part in str(error.value)
    with pytest.raises(InputError, match=r"must accept \(root=\.\.\.\)"):
        register_dataset("own", ("a", "b"))(lambda folder: None)
    register_network("own")(Linear)
    register_network("own")(Linear)
    with pytest.raises(InputError, match=r"registered twice, by .*\.Linear and .*\.Good"):
        register_network("own")(Good)


class Samples:
    """A valid part of a data set; the wrong ones below return other samples."""

    def __init__(self, count: int = 9, sample: Callable[[int], Any] | None = None) -> None:
        self.count = count
        self.sample = sample or (lambda index: (np.full((28, 28), index, np.uint8), index % 3))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


IMAGE = np.zeros((28, 28), np.uint8)
ITEMS: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "floats": (lambda i: (torch.zeros(28, 28), 0), ["item 0 of its training set is float32", "without ToTensor"]),
    "a channel": (lambda i: (torch.zeros(1, 28, 28, dtype=torch.uint8), 0), ["[1, 28, 28]", "28x28"]),
    "larger images": (lambda i: (np.zeros((32, 32), np.uint8), 0), ["[32, 32]", "28x28"]),
    "colors": (lambda i: (Image.new("RGB", (28, 28)), 0), ["[28, 28, 3]", "convert('L')"]),
    "one bit": (lambda i: (Image.new("1", (28, 28)), 0), ["is bool", "uint8"]),
    "other types within": (lambda i: (IMAGE.astype(np.int16) if i == 5 else IMAGE, 0), ["item 5", "int16"]),
    "a label too large": (lambda i: (IMAGE, i), ["label of item 3", "from 0 to 2", "3 class_names"]),
    "a negative label": (lambda i: (IMAGE, -1), ["label of item 0", "is -1"]),
    "a name as label": (lambda i: (IMAGE, "cat"), ["is cat", "an integer"]),
    "a fraction as label": (lambda i: (IMAGE, 1.0), ["is 1.0", "an integer"]),
    "no label": (lambda i: IMAGE, ["is a ndarray", "return (image, label)"]),
    "three values": (lambda i: (IMAGE, 0, 0), ["return (image, label)"]),
    "an error": (lambda i: {}[i], ["item 0 of its training set fails: KeyError", "test_registry.py, line"]),
    "random images": (
        lambda i: (np.random.default_rng().integers(0, 256, (28, 28), dtype=np.uint8), 0),
        ["differs when it is read again", "__getitem__(i) must depend on i alone", "data.augment"],
    ),
    "random labels": (lambda i: (IMAGE, random.randrange(3)), ["differs when it is read again"]),
}


def load_own(root: str | None = None) -> Any:
    return load_dataset(DataSettings(name="own", root=root))  # type: ignore[arg-type]


def assert_bad_data(make: Callable[..., Any], *parts: str) -> None:
    DATASETS.clear()
    register_dataset("own", ("a", "b", "c"))(make)
    with pytest.raises(InputError) as error:
        load_own()
    message = str(error.value)
    assert message.startswith("data.name own: ")
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("case", ITEMS)
def test_a_wrong_sample_is_rejected_with_what_to_change(case: str) -> None:
    sample, parts = ITEMS[case]
    assert_bad_data(lambda: (Samples(60, sample), Samples()), *parts)


def test_a_wrong_data_set_is_rejected_with_what_to_change() -> None:
    assert_bad_data(lambda: (Samples(), Samples(0)), "test set is empty")
    assert_bad_data(Samples, "must return (train, test)")
    assert_bad_data(lambda: (Samples(), iter([])), "must return (train, test)")
    assert_bad_data(lambda: 1 / 0, "fails: ZeroDivisionError")
    # Valid until it is made again.
    lengths = iter((9, 9, 8, 9))
    assert_bad_data(lambda: (Samples(next(lengths)), Samples(next(lengths))), "the length of its training set differs")
    generator = np.random.default_rng(1)

    def unseeded() -> tuple[Samples, Samples]:
        image = generator.integers(0, 256, (28, 28), dtype=np.uint8)
        return Samples(), Samples(9, lambda _: (image, 0))

    assert_bad_data(unseeded, "of its test set differs", "fixed seed")
    for names in ("ab", (), ("a",), ("a", "a"), ("a", 1)):
        with pytest.raises(InputError, match="class_names must be"):
            register_dataset("other", names)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a name of the project"):
        register_dataset("mnist", ("a", "b"))(lambda: None)


def test_every_form_of_a_sample_gives_the_same_data() -> None:
    def image(index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 256, (28, 28), dtype=np.uint8)

    forms: list[Callable[[int], Any]] = [
        lambda i: (image(i), i % 2),
        lambda i: [torch.from_numpy(image(i)), torch.tensor(i % 2)],
        lambda i: (Image.fromarray(image(i)), np.int64(i % 2)),
    ]
    found = []
    for form in forms:
        register_dataset("own", ("a", "b"))(lambda form=form: (Samples(9, form), Samples(4, form)))
        found.append(load_own())
    assert len({dataset.sha256 for dataset in found}) == 1
    assert torch.equal(found[0].train.images[3], torch.from_numpy(image(3)))
    assert found[0].class_names == ("a", "b")
    assert "registered by" in found[0].source

    class Both:
        def __init__(self, root: Path | None = None) -> None:
            self.train, self.test = Samples(9, forms[0]), Samples(5 if root else 4, forms[0])

    register_dataset("as_well", ("a", "b"))(Both)
    settings = DataSettings(name="as_well", val_size=2, batch_size=3)  # type: ignore[arg-type]
    assert load_dataset(settings).sha256 == found[0].sha256
    assert len(load_dataset(DataSettings(name="as_well", root="here")).test) == 5  # type: ignore[arg-type]
    module = MNISTDataModule(name="as_well", val_size=2, batch_size=3)
    assert sum(len(batch.images) for batch in module.train_dataloader()) == 6


def test_the_options_list_registered_names_and_reject_what_has_no_effect() -> None:
    register_network("own")(Linear)
    register_dataset("own", ("a", "b"))(lambda: None)
    assert "own" in options()["model.net"].wanted
    assert parse(["--model.net", "own", "--data.name", "own"]).experiment().model.net == "own"
    for words, part in (
        (["--model.net", "own", "--model.views", "5"], "an argument views"),
        (["--model.net", "own", "--model.compile", "true"], "model.compile does not apply to model.net own"),
        (["--data.name", "own", "--data.root", "x"], "an argument root"),
    ):
        with pytest.raises(InputError) as error:
            parse(words).experiment()
        assert part in str(error.value), words


MINE = """
import numpy as np
from torch import nn
from lit_mnist import register_dataset, register_network

@register_network("mine")
class Mine(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(784, num_classes)

    def forward(self, images, rng):
        return self.fc(images.flatten(1))

class Part:
    def __len__(self): return 40
    def __getitem__(self, index): return np.full((28, 28), index, np.uint8), index % 2

@register_dataset("parity", class_names=("even", "odd"))
def make(): return Part(), Part()
"""


@pytest.mark.usefixtures("forked_python")
def test_names_without_import_are_rejected_with_the_flag_to_add(program: Program) -> None:
    (program.folder / "mine.py").write_text(MINE)
    words = ("--import", "mine", "--model.net", "mine", "--data.name", "parity", "--data.val_size", 8)
    folder = program.train(*words, "--batch-size", 4, "--max-steps", 2, "--model.schedule", "constant", engine="single")
    assert "mine" in program("fit", "--help", "--import", "mine").out
    advice = ("--import PACKAGE", '@register_network("mine")')
    assert_rejected(program("--model.net", "mine"), "model.net must be one of convnet", *advice)
    assert_rejected(program("--data.name", "parit"), "--import PACKAGE", '@register_dataset("parit")')
    assert_rejected(program("--config", folder / "config.yaml"), "model.net", *advice)
    for command in (("test", "--ckpt"), ("predict", "--ckpt"), ("fit", "--resume")):
        assert_rejected(program(*command, folder), str(folder), "model.net", *advice)
    python = "import lit_mnist, sys; lit_mnist.load(sys.argv[1])"
    for before, code in (("", 1), ("import mine; ", 0)):
        done = subprocess.run(
            [sys.executable, "-c", before + python, str(folder)],
            cwd=program.folder, capture_output=True, text=True, env=CHILD_ENV, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert ("--import PACKAGE" in done.stderr) == bool(code)


def test_a_wrong_network_is_rejected_before_anything_is_written(program: Program) -> None:
    (program.folder / "bad.py").write_text(
        MINE.replace("self.fc(images.flatten(1))", "self.fc(images.flatten(1))[:, :1]")
    )
    for words in (("--devices", 2), ("compare", "--devices", 2)):
        done = program(*words, "--import", "bad", "--model.net", "mine")
        assert_rejected(done, "model.net mine", "[4, 1] for 4 images and 10 classes")
    (program.folder / "twice.py").write_text("import bad\n" + MINE)
    assert_rejected(program("--import", "twice"), "model.net mine is registered twice, by bad.Mine and twice.Mine")
    assert not list(program.folder.glob("runs*"))
