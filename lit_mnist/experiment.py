"""The experiment: what is trained, on what, and how; shared by every engine.

Three frozen sections (`model`, `data`, `trainer`) and the seed define what is computed. The fourth, `run`, says where
and how safely, and never changes what is computed, except through `run.threads`. The dataclasses' defaults are the
default experiment; a YAML file or a flag states what differs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lit_mnist.errors import InputError

Net = Literal[
    "convnet",
    "basicnet",
    "deeplabv3_resnet101",
    "deeplabv3_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_small",
]
Precision = Literal["auto", "32-true", "64-true", "16-mixed", "bf16-mixed"]
# A number of steps, or of seconds; neither is zero.
_PERIOD = r"[1-9]\d{0,8}|(?!0+\.?0*s)\d{1,9}(\.\d{1,3})?s"
_FAULT = r"(kill|raise|stop|nan):rank=(\d{1,6}),step=([1-9]\d{0,8})"
DATA_NAMES = ("mnist", "fashion_mnist", "kmnist", "qmnist", "emnist")
SCENE_NAMES = ("voc2012", "shapes")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


@dataclass(frozen=True)
class ModelSettings:
    """The network and how its weights are moved.

    Args:
        net: For digits `convnet` (5x5 convolutions with batch norm) or `basicnet` (3x3 convolutions with dropout); for
            scenes torchvision's `deeplabv3_resnet101`, `deeplabv3_resnet50` or `deeplabv3_mobilenet_v3_large`, or
            `deeplabv3_small`, the same built small enough for a CPU.
        weights: Where a training starts from: `none`, from random weights; `backbone`, with torchvision's weights of
            the backbone, trained on ImageNet; or a file of weights: .pt or .pth, .safetensors, or a checkpoint.
        checkpoint_activations: Whether a deeplabv3 keeps only its stages' inputs of the forward pass, and computes the
            rest once more in the backward pass: less memory for more time, and the same weights.
        dropout: Dropout rate of `basicnet` before its last layer, whose convolutional part drops half as much; or of a
            deeplabv3 after its pyramid of dilated convolutions.
        optimizer: `sgd`, `adam` or `adamw`.
        lr: Learning rate; with a schedule other than `constant`, its peak.
        lr_scale: How the rate follows the batch where `data.batch_per: rank` makes it grow with the ranks: `none`: not;
            `linear`: it is multiplied by the number of ranks; `sqrt`: by its square root.
        momentum: Momentum of `sgd`.
        nesterov: Whether `sgd` uses Nesterov's form of momentum.
        weight_decay: Weight decay: an L2 term in the gradient for `sgd` and `adam`, decoupled for `adamw`.
        schedule: Course of the learning rate over the optimizer steps of the run: `constant`, `onecycle` (linear
            up, linear down to nearly nothing), `cosine` or `polynomial` (after the warm-up, down to zero, the latter as
            the power 0.9 of the steps that are left).
        warmup: Share of the steps, from 0 to 1, over which the rate rises linearly; unset: 0.25 for `onecycle`, else 0.
        label_smoothing: Share of the target probability spread over all classes, in training only.
        views: Views of a picture whose logits an evaluation takes the mean of: 1, the picture alone; 5 or 9, also
            copies shifted by a pixel. Training does not see them.
        compile: Whether torch.compile makes the network's kernels: it takes from ten seconds to minutes at the start,
            needs a C++ compiler on a CPU, and rounds otherwise.
    """

    net: Net = "convnet"
    weights: str = "none"
    checkpoint_activations: bool = False
    dropout: float = 0.5
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    schedule: Literal["constant", "onecycle", "cosine", "polynomial"] = "onecycle"
    warmup: float | None = None
    label_smoothing: float = 0.0
    views: Literal[1, 5, 9] = 1
    compile: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.weights), "model.weights is empty: say none, backbone, or a file of weights.")
        _require(0 <= self.dropout < 1, f"model.dropout must be at least 0 and below 1, but is {self.dropout}.")
        _require(0 < self.lr < math.inf, f"model.lr must be above 0 and finite, but is {self.lr}.")
        _require(0 <= self.momentum < 1, f"model.momentum must be at least 0 and below 1, but is {self.momentum}.")
        _require(
            not (self.nesterov and self.optimizer == "sgd" and self.momentum == 0),
            "model.nesterov needs a model.momentum above 0: set a momentum, or model.nesterov: false.",
        )
        _require(
            0 <= self.weight_decay < math.inf,
            f"model.weight_decay must be at least 0 and finite, but is {self.weight_decay}.",
        )
        _require(
            self.warmup is None or 0 <= self.warmup <= 1,
            f"model.warmup must be from 0 to 1, or unset, but is {self.warmup}.",
        )
        _require(
            0 <= self.label_smoothing < 1,
            f"model.label_smoothing must be at least 0 and below 1, but is {self.label_smoothing}.",
        )


@dataclass(frozen=True)
class DataSettings:
    """The data set, its split, and how batches are cut from it.

    Args:
        name: Digits: `mnist` (embedded in the package), or `fashion_mnist`, `kmnist`, `qmnist`, `emnist` (downloaded
            once). Scenes, of which every pixel has a class: `voc2012` (Pascal VOC), or `shapes` (made once).
        root: Folder of the data files. Without one, MNIST comes from the package, the others from the user's cache.
        download: Whether `voc2012` is downloaded, once, where its files are missing.
        emnist_split: Which of EMNIST's splits, where `name` is `emnist`.
        batch_size: Samples of one micro-batch over all ranks (or of one rank: see `batch_per`).
        batch_per: `global`: `batch_size` counts all ranks' samples; `rank`: it is multiplied by the number of ranks.
        eval_batch_size: Samples that a rank evaluates at once, which changes no result; unset: 1000, of scenes 16.
        val_size: Samples taken off the training set for validation; 0 for none.
        train_size: Train on the first so many samples (after the validation split) only.
        test_size: Test on the first so many samples only.
        image_size: Height and width, in pixels, that scenes are brought to.
        border: What becomes of the pixels that `voc2012` and `shapes` mark as an object's border, by 255: `ignore`:
            they count nowhere; `class`: they are one more class.
        augment: For digits `none`, `shift` (whole pixels) or `affine` (rotation, scale and sub-pixel shift); for scenes
            `none` or `crop` (random scale, place and flip).
        max_shift: Largest shift in pixels, each way, of `shift` and `affine`.
        max_rotate: Largest rotation in degrees, each way, of `affine`.
        max_scale: Largest relative change of size of `affine`: 0.1 is from 0.9 to 1.1.
        pipeline: `batched`: pictures become a float batch in one step; `per_sample`: each is turned by itself, by PIL
            and torchvision, as the classic scripts do: slower, and equal up to rounding.
        workers: Processes of each rank that load ahead, with `per_sample` and for scenes, which are always read one by
            one; 0: the rank itself turns the samples.
    """

    name: Literal["mnist", "fashion_mnist", "kmnist", "qmnist", "emnist", "voc2012", "shapes"] = "mnist"
    root: str | None = None
    download: bool = False
    emnist_split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    batch_size: int = 64
    batch_per: Literal["global", "rank"] = "global"
    eval_batch_size: int | None = None
    val_size: int = 5000
    train_size: int | None = None
    test_size: int | None = None
    image_size: int = 256
    border: Literal["ignore", "class"] = "ignore"
    augment: Literal["none", "shift", "affine", "crop"] = "none"
    max_shift: int = 2
    max_rotate: float = 10.0
    max_scale: float = 0.1
    pipeline: Literal["batched", "per_sample"] = "batched"
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_batch_size", "train_size", "test_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"data.{name} must be at least 1, but is {value}.")
        _require(self.val_size >= 0, f"data.val_size must be at least 0, but is {self.val_size}.")
        _require(0 <= self.max_shift <= 14, f"data.max_shift must be from 0 to 14 pixels, but is {self.max_shift}.")
        _require(0 <= self.max_rotate <= 180, f"data.max_rotate must be from 0 to 180, but is {self.max_rotate}.")
        _require(0 <= self.max_scale < 1, f"data.max_scale must be at least 0 and below 1, but is {self.max_scale}.")
        _require(0 <= self.workers <= 64, f"data.workers must be from 0 to 64, but is {self.workers}.")
        _require(16 <= self.image_size <= 4096, f"data.image_size must be from 16 to 4096, but is {self.image_size}.")
        _require(
            self.workers == 0 or self.pipeline == "per_sample" or self.name in SCENE_NAMES,
            f"data.workers {self.workers} needs data.pipeline per_sample: whole batches are cut without workers.",
        )

    @property
    def evaluated_at_once(self) -> int:
        """Samples that a rank evaluates at once."""
        return self.eval_batch_size or (16 if self.name in SCENE_NAMES else 1000)


@dataclass(frozen=True)
class TrainerSettings:
    """The part of Lightning's Trainer options that every engine understands, under the same names.

    Args:
        max_epochs: Epochs to train.
        max_steps: Optimizer steps to train at most; -1 for no limit beside the epochs.
        accelerator: `cpu`, `gpu`, or `auto`: GPUs where there are any.
        devices: Number of ranks on this machine, a list of GPU numbers, or `auto`: all GPUs, or one rank on a CPU.
        num_nodes: Number of machines; more than one needs an outside launcher.
        strategy: `auto` or `ddp`: distributed data parallel training where there are several ranks.
        precision: `32-true`, `64-true`, `16-mixed`, `bf16-mixed`, or `auto`: 16-mixed on GPUs; on CPUs bf16-mixed
            where the processor computes in it, else 32-true.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks; unset: where there are several ranks.
        accumulate_grad_batches: Micro-batches of one optimizer step.
        gradient_clip_val: Largest norm of the gradient; unset: not clipped.
        deterministic: Whether only deterministic algorithms are allowed.
    """

    max_epochs: int = 1
    max_steps: int = -1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int | list[int] | Literal["auto"] = "auto"
    num_nodes: int = 1
    strategy: Literal["auto", "ddp"] = "auto"
    precision: Precision = "auto"
    sync_batchnorm: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        _require(self.max_epochs >= 1, f"trainer.max_epochs must be at least 1, but is {self.max_epochs}.")
        _require(
            self.max_steps == -1 or self.max_steps >= 1,
            f"trainer.max_steps must be at least 1, or -1 for no limit, but is {self.max_steps}.",
        )
        if isinstance(self.devices, list):
            _require(len(self.devices) >= 1, "trainer.devices is an empty list: name at least one device.")
            _require(
                len(set(self.devices)) == len(self.devices) and min(self.devices) >= 0,
                f"trainer.devices must list different device numbers from 0, but is {self.devices}.",
            )
        elif self.devices != "auto":
            _require(self.devices >= 1, f"trainer.devices must be at least 1, but is {self.devices}.")
        _require(self.num_nodes >= 1, f"trainer.num_nodes must be at least 1, but is {self.num_nodes}.")
        _require(
            self.accumulate_grad_batches >= 1,
            f"trainer.accumulate_grad_batches must be at least 1, but is {self.accumulate_grad_batches}.",
        )
        _require(
            self.gradient_clip_val is None or 0 < self.gradient_clip_val < math.inf,
            f"trainer.gradient_clip_val must be above 0 and finite, or unset, but is {self.gradient_clip_val}.",
        )


@dataclass(frozen=True)
class RunSettings:
    """Where a run writes and how it is watched; nothing here changes what is computed, except `threads`.

    Args:
        dir: The run folder; by default `runs/<time>-<name>`.
        resume: A run folder or checkpoint to go on from.
        save_every: Steps (`100`) or seconds (`30s`) between checkpoints within an epoch; unset: at epochs' ends only.
        keep: Newest checkpoints to keep, beside the best.
        timeout: Seconds that a rank waits for the others before it gives up.
        max_restarts: How often lost ranks are started again.
        inject: A fault to see what happens: `kill`, `raise`, `stop` or `nan`, as in `kill:rank=1,step=50`. A resumed or
            restarted run does not repeat it.
        threads: Threads of each rank; by default the cores divided by the ranks. The bits of a result depend on it.
        launcher: `agent`: torch's elastic agent starts the ranks of this machine; `spawn`: torch.multiprocessing.spawn.
        servers: Ranks that also are parameter servers, for the engine `parameter_server`.
        trace: What each rank writes down in `trace/`: `none`; `steps`: what it trains on and what comes out, step by
            step; `traffic`: also what it sends, over a few steps; `times`: how long each part of a step takes.
        trace_step: A step after which the trace keeps whole weights, and not only their digests.
    """

    dir: str | None = None
    resume: str | None = None
    save_every: int | str | None = None
    keep: int = 2
    timeout: float = 120.0
    max_restarts: int = 0
    inject: str | None = None
    threads: int | None = None
    launcher: Literal["agent", "spawn"] = "agent"
    servers: int = 1
    trace: Literal["none", "steps", "traffic", "times"] = "none"
    trace_step: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.save_every is None or bool(re.fullmatch(_PERIOD, str(self.save_every))),
            f"run.save_every must be steps, such as 100, or seconds, such as 30s, but is {self.save_every}.",
        )
        _require(self.keep >= 1, f"run.keep must be at least 1 checkpoint, but is {self.keep}.")
        _require(
            self.inject is None or bool(re.fullmatch(_FAULT, self.inject)),
            f"run.inject must be kill, raise, stop or nan with a rank and a step, such as kill:rank=1,step=50, but is "
            f"{self.inject}.",
        )
        _require(
            self.trace_step is None or self.trace in {"steps", "traffic"},
            "run.trace_step needs a trace of the weights: set run.trace to steps or traffic, too.",
        )
        _require(self.servers >= 1, f"run.servers must be at least 1, but is {self.servers}.")
        _require(0 < self.timeout < 1e6, f"run.timeout must be above 0 seconds, but is {self.timeout}.")
        _require(self.max_restarts >= 0, f"run.max_restarts must be at least 0, but is {self.max_restarts}.")
        _require(
            self.threads is None or 1 <= self.threads <= 1024,
            f"run.threads must be from 1 to 1024, or unset, but is {self.threads}.",
        )

    @property
    def save_steps(self) -> int | None:
        """Steps between checkpoints, where `save_every` tells steps."""
        return None if self.save_every is None or str(self.save_every).endswith("s") else int(self.save_every)

    @property
    def save_seconds(self) -> float | None:
        """Seconds between checkpoints, where `save_every` tells seconds."""
        text = str(self.save_every)
        return float(text[:-1]) if self.save_every is not None and text.endswith("s") else None

    @property
    def fault(self) -> tuple[str, int, int] | None:
        """The kind, rank and step of the fault to inject, or None."""
        found = re.fullmatch(_FAULT, self.inject or "")
        return (found[1], int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True)
class Experiment:
    """One experiment: everything that determines the numbers of a run, and the `run` section."""

    seed_everything: int = 42
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        _require(
            0 <= self.seed_everything < 2**32,
            f"seed_everything must be from 0 to 4294967295, but is {self.seed_everything}.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the experiment as nested plain values, in the sections of a configuration file."""
        return asdict(self)

    def replace(self, section: str, **changes: Any) -> Experiment:
        """Returns a copy with some settings of one section changed."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **changes)})
