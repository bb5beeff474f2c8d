"""Your networks and data sets, registered with a name: `--import my_package --model.net mine`. Imports no torch.

The decorators only store what they decorate. `models/registered_network.py` and `data/registered_dataset.py` call it,
and check what it returns.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment.data import Name
from lit_mnist.experiment.model import Net

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MOST_CLASSES = 1000
Make = TypeVar("Make", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registered:
    """A registered network or data set.

    Attributes:
        key: `model.net` or `data.name`.
        name: Its name.
        make: The function or class that was registered.
        arguments: Names of the optional arguments that it accepts.
        class_names: The names of the classes of a data set.
    """

    key: str
    name: str
    make: Callable[..., Any]
    arguments: frozenset[str]
    class_names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The setting that selects it, such as `model.net mine`."""
        return f"{self.key} {self.name}"

    @property
    def path(self) -> str:
        """The dotted name of what was registered, such as `my_package.TinyNet`."""
        return f"{self.make.__module__}.{self.make.__qualname__}"

    @property
    def file(self) -> str | None:
        """The source file, if there is one."""
        try:
            return inspect.getsourcefile(inspect.unwrap(self.make))
        except (OSError, TypeError):
            return None

    def call(self, *args: Any, **options: Any) -> Any:
        """Calls what was registered with those options that it accepts.

        Raises:
            InputError: The call fails; its error is the cause.
        """
        given = {name: value for name, value in options.items() if name in self.arguments}
        return self.guard(self.path, lambda: self.make(*args, **given))

    def guard(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns what `work` returns; turns an error of the user's code into one message.

        Raises:
            InputError: `work` fails; its error is the cause.
        """
        try:
            return work()
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{self.title}: {what} fails: {_describe(error, self.file)}") from error

    def to_dict(self) -> dict[str, str | None]:
        """Returns name, dotted name, and the source file with its SHA-256, for `result.json`."""
        try:
            digest = hashlib.sha256(Path(self.file).read_bytes()).hexdigest() if self.file else None
        except OSError:
            digest = None
        return {"name": self.name, "object": self.path, "file": self.file, "sha256": digest}


NETWORKS: dict[str, Registered] = {}
DATASETS: dict[str, Registered] = {}
# The registered objects by the option that selects them.
REGISTERED: Mapping[str, Mapping[str, Registered]] = {"model.net": NETWORKS, "data.name": DATASETS}


def register_network(name: str) -> Callable[[Make], Make]:
    """Registers your network, for all engines: `--import my_package --model.net NAME`.

    The decorated class or function is called with the number of classes, and with the options `dropout` and `views` if
    it has arguments of these names. It returns an `nn.Module` with `forward(images, rng)`: images float
    [batch, 1, 28, 28], normalized; `rng` for the project's dropout layers, None in evaluation. It returns logits
    [batch, num_classes]:

        @register_network("linear")
        class Linear(nn.Module):
            def __init__(self, num_classes, dropout=0.5):
                super().__init__()
                self.dropout = SeededDropout(dropout, layer=1)
                self.fc = nn.Linear(784, num_classes)

            def forward(self, images, rng):
                return self.fc(self.dropout(images.flatten(1), rng))

    Args:
        name: The value of `model.net`.

    Raises:
        InputError: The name is invalid or taken, or the arguments are others.
    """
    _check_name("model.net", "register_network", name)

    def register(make: Make) -> Make:
        _add(NETWORKS, "model.net", name, make, ("num_classes",), {"dropout", "views"})
        return make

    return register


def register_dataset(name: str, class_names: Sequence[str]) -> Callable[[Make], Make]:
    """Registers your data set, for all engines: `--import my_package --data.name NAME`.

    The decorated function is called without arguments, or with `root`, the option `data.root`, if it has an argument of
    this name. It returns the training and the test set, two map-style data sets of (image, label): grey values uint8
    [28, 28] as tensor, array or PIL image, and an integer from 0. Each sample is read once, before the training starts:
    it must depend on its index alone. A class may also be registered, if its objects have `train` and `test`.

    The label is the index modulo 2 here:

        @register_dataset("halves", class_names=("top", "bottom"))
        def halves():
            samples = [(torch.full((28, 28), index, dtype=torch.uint8), index % 2) for index in range(100)]
            return samples[:80], samples[80:]

    Args:
        name: The value of `data.name`.
        class_names: Names of the classes, in the order of the labels.

    Raises:
        InputError: The name is invalid or taken, the arguments are others, or the class names are not different texts.
    """
    _check_name("data.name", "register_dataset", name)
    names = () if isinstance(class_names, str) else tuple(class_names)
    texts = all(isinstance(text, str) and text for text in names)
    if not texts or not 2 <= len(set(names)) == len(names) <= _MOST_CLASSES:
        raise InputError(
            f"data.name {name}: class_names must be 2 to {_MOST_CLASSES} different texts, such as ('cat', 'dog'), but "
            f"is {str(class_names)[:100]}."
        )

    def register(make: Make) -> Make:
        _add(DATASETS, "data.name", name, make, (), {"root"}, names)
        return make

    return register


def registered_by(settings: Mapping[str, Any]) -> list[Registered]:
    """Returns the registered network and data set that settings, by dotted keys, select."""
    return [known[settings[key]] for key, known in REGISTERED.items() if settings.get(key) in known]


def explain_unknown(key: str, name: str, choices: Collection[Any]) -> str:
    """Returns what to do about an unknown network or data set; nothing for other options."""
    if key not in REGISTERED:
        return "."
    hint = nearest(name, map(str, choices)) or "."
    decorator = "register_network" if key == "model.net" else "register_dataset"
    return (
        f"{hint} If {name} is your own, add --import PACKAGE, with the package that has "
        f'@{decorator}("{name}"). In Python, import it first.'
    )


def _check_name(key: str, decorator: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{key}: {name!r} is not a name of up to 64 letters, digits and underscores, which begins with a letter: "
            f'write @{decorator}("mine").'
        )


def _add(
    known: dict[str, Registered],
    key: str,
    name: str,
    make: Callable[..., Any],
    required: tuple[str, ...],
    options: set[str],
    class_names: tuple[str, ...] = (),
) -> None:
    if not callable(make) or not hasattr(make, "__qualname__"):
        raise InputError(f"{key} {name}: register a class or a function, not {make!r}.")
    if name in get_args(Net if known is NETWORKS else Name):
        raise InputError(f"{key} {name} is a name of the project: choose another one.")
    new = Registered(key, name, make, _accepted(f"{key} {name}", make, required, options), class_names)
    # A notebook runs a cell again, and importlib.reload a module.
    if name in known and known[name].path != new.path:
        raise InputError(f"{key} {name} is registered twice, by {known[name].path} and {new.path}: rename one of them.")
    known[name] = new


def _accepted(title: str, make: Callable[..., Any], required: tuple[str, ...], options: set[str]) -> frozenset[str]:
    """Returns which options a function accepts; rejects one that cannot be called with the required arguments."""
    wanted = f"({', '.join([*required, *(f'{option}=...' for option in sorted(options))])})"
    try:
        signature = inspect.signature(make)
        signature.bind(*required)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{title}: {make.__qualname__} must accept {wanted}, where the arguments with = are optional, but "
            f"{' '.join(str(error).split())}."
        ) from error
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return frozenset(options if takes_any else options & signature.parameters.keys())


def _describe(error: Exception, file: str | None) -> str:
    """Returns an error in one line, with the last place in the user's file, or else the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    place = f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}."
