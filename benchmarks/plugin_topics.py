"""What the plugins cost, and what a resume costs: the topics of `benchmarks/plugins.py` and `benchmarks/resume.py`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.programs import printed, printed_numbers
from benchmarks.rounds import Measurement, Numbers, Ratio, Rows, Topic

# Each plugin, and the variant of a stock Trainer that it is compared with; benchmarks/plugins.py trains them.
STOCK, STOCK_SAVING = "stock", "stock, saving"
STOCK_16_BIT, STOCK_VALIDATING = "stock, bf16-mixed", "stock, validating"
EXCHANGES = "stock, exchanges of synchronized batch norm"
# All plugins, and what they are compared with: what Lightning does by default, saving alone, and saving with the
# exchanges that synchronized batch norm requires.
ALL, STOCK_DEFAULTS = "all", "stock, saving, progress bar and logger"
STOCK_EXCHANGING = "stock, saving, exchanges of synchronized batch norm"
PLUGINS = {
    "ExactDistributedSampler": STOCK,
    "PortableSyncBatchNorm": STOCK,
    "FailureReport": STOCK,
    "KeepMemory": STOCK,
    "VerifiedCheckpointIO": STOCK_SAVING,
    "ExactCheckpoint": STOCK_SAVING,
    ALL: STOCK_SAVING,
    "Float16OnCPU": STOCK_16_BIT,
    "exact_metric": STOCK_VALIDATING,
}
# With the least ratio of all plugins to it.
_OTHERS = {STOCK_SAVING: None, STOCK_EXCHANGING: 0.95, STOCK_DEFAULTS: 1.0}
PLUGIN_STEPS, STEPS_BETWEEN_SAVES = 120, 20
# The dataloaders with which benchmarks/resume.py resumes: the batches of the last two are loaded again.
RESUMED = ("seekable", "StatefulDataLoader", "TensorDataset", "map-style", "iterable")
_FEW, _MANY = 100, 10_000


def plugins() -> Topic:
    """What does each plugin cost under a stock Trainer?"""
    measurements: list[Measurement] = []
    ratios: list[Ratio] = []
    for batch in (64, 256):
        measurements += [
            Measurement(
                f"{name}, batch {batch}", partial(printed, ("-m", "benchmarks.plugins", name, "--batch-size", batch))
            )
            for name in (STOCK, STOCK_SAVING, STOCK_16_BIT, STOCK_VALIDATING, EXCHANGES, *PLUGINS)
        ]
        ratios += [Ratio(f"{name}, batch {batch}", f"{other}, batch {batch}") for name, other in PLUGINS.items()]
        ratios.append(
            Ratio(f"PortableSyncBatchNorm, batch {batch}", f"{EXCHANGES}, batch {batch}", at_least=0.8),
        )
    return Topic(
        name="plugins",
        title="Plugins under a stock Trainer, two ranks",
        measurements=measurements,
        ratios=ratios,
        notes=(
            f"A ConvNet with two batch norm layers in float32, {PLUGIN_STEPS} steps. `{STOCK_SAVING}` saves by "
            f"ModelCheckpoint every {STEPS_BETWEEN_SAVES} steps, and so do the rows that are compared with it; they "
            "count the mean over the steps, the others the median. "
            f"`{EXCHANGES}` sends what PortableSyncBatchNorm sends, beside torch's batch norm: the rest of its cost "
            "is the plugin's own. "
            f"`{STOCK_VALIDATING}` and `exact_metric` evaluate 5,000 images; the former logs the loss with sync_dist.",
        ),
    )


def together() -> Topic:
    """What do all plugins cost together?"""
    measurements: list[Measurement] = []
    ratios: list[Ratio] = []
    for batch in (64, 256):
        words = {name: ("-m", "benchmarks.plugins", name, "--batch-size", batch) for name in (*_OTHERS, ALL)}
        measurements += [Measurement(f"{name}, batch {batch}", partial(printed, words[name])) for name in words]
        ratios += [Ratio(f"{ALL}, batch {batch}", f"{name}, batch {batch}", at_least=_OTHERS[name]) for name in _OTHERS]
    return Topic(
        name="together",
        title="All plugins under a stock Trainer, two ranks",
        measurements=measurements,
        ratios=ratios,
        notes=(
            f"The training of the topic `plugins`. `{STOCK_EXCHANGING}` sends what PortableSyncBatchNorm sends, beside "
            f"torch's batch norm. `{STOCK_DEFAULTS}` has Lightning's progress bar and a TensorBoard logger.",
        ),
    )


def resume() -> Topic:
    """How long does a resumed training run take to its first new step?"""
    measurements: list[Measurement] = []
    ratios: list[Ratio] = []
    for kind in RESUMED:
        names = {steps: f"{kind}, after {steps:,} steps" for steps in (_FEW, _MANY)}
        trained: list[float] = []
        measurements += [
            Measurement(name, partial(_resumed, kind, steps, trained), "seconds", partial(_lacks_loader, kind))
            for steps, name in names.items()
        ]
        training = Measurement(
            f"{kind}, training of {_MANY:,} steps", partial(_last, trained), "seconds", partial(_lacks_loader, kind)
        )
        measurements.append(training)
        ratios += [Ratio(names[_MANY], names[_FEW]), Ratio(names[_MANY], training.name, at_most=1 / 20)]
    return Topic(
        name="resume",
        title="From the call of fit to the first new step of a resumed training run",
        measurements=measurements,
        ratios=ratios,
        notes=(
            "A linear layer on 64 samples per batch under a stock Trainer with ExactCheckpoint. `seekable`: a "
            "DataLoader with ExactDistributedSampler. Of a DataLoader that shuffles a TensorDataset, only the indices "
            "are drawn again. The batches of a user's map-style dataset, and of an iterable one, are loaded again.",
        ),
    )


def _resumed(kind: str, steps: int, trained: list[float], folder: Path) -> Numbers:
    numbers = printed_numbers("-m", "benchmarks.resume", kind, "--steps", steps, folder=folder)
    trained.append(numbers["train_seconds"])
    return numbers


def _lacks_loader(kind: str, rows: Rows) -> str | None:
    missing = kind == "StatefulDataLoader" and find_spec("torchdata") is None
    return "torchdata is not installed" if missing else None


def _last(trained: list[float], folder: Path) -> Numbers:
    return {"seconds": trained[-1]}
