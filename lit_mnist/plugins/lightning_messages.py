"""The messages of Lightning that are not shown, each with its reason. All others are shown."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

WARNINGS = "warnings"
# Lightning's messages have the logger of whichever of its packages a program has imported last.
PACKAGES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_RANK_ZERO = "lightning.pytorch.utilities.rank_zero"


@dataclass(frozen=True)
class Message:
    """A message that is not shown.

    Attributes:
        source: Name of the logger in `lightning.pytorch`, for all `PACKAGES`, or `WARNINGS`.
        pattern: A regular expression for its beginning.
        reason: Why nobody needs it.
    """

    source: str
    pattern: str
    reason: str

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is another message."""
        return re.match(self.pattern, record.getMessage()) is None


OF_LIT_TRAINER = (
    Message(_RANK_ZERO, r"GPU available: ", "LitTrainer chooses the device and rejects one that is not there"),
    Message(_RANK_ZERO, r"TPU available: ", "LitTrainer uses CPUs and GPUs only"),
    Message(_RANK_ZERO, r"\S+ Tip: .*\[lit(logger|models)\]", "advertises a package that changes no training"),
    Message(WARNINGS, r".*isinstance\(treespec, LeafSpec\)", "Lightning itself causes it"),
)
OF_RUNS = (
    Message(_RANK_ZERO, r"`Trainer\(\w+=1\.0\)` was configured so 100%", "every run passes the default"),
    Message(_RANK_ZERO, r"-+\ndistributed_backend=", "the line `running` names the ranks and the device"),
    Message("lightning.fabric.utilities.distributed", r"Initializing distributed: ", "the same"),
    Message("lightning.pytorch.accelerators.cuda", r"LOCAL_RANK: ", "the same"),
    Message(_RANK_ZERO, r"Using (16bit|16-bit|bfloat16) Automatic Mixed Precision", "the line `running` names it"),
    Message(_RANK_ZERO, r"`Trainer\.fit` stopped: `max_\w+=.*` reached", "the line `trained` has the steps"),
    Message(_RANK_ZERO, r"(Restoring states|Restored all states) from", "the command has named the checkpoint"),
    Message(_RANK_ZERO, r"Loading `train_dataloader` to estimate", "an optimizer's schedule asks for the steps"),
    Message(_RANK_ZERO, r"the learning rate rises to", "the command prints it before it starts the ranks"),
    Message(_RANK_ZERO, r"\d+ samples of each epoch are dropped: they do not fill a batch", "the same"),
    Message(
        WARNINGS,
        r"The number of training batches \(\d+\) is smaller than the logging interval",
        "the first and the last step of an epoch are always logged",
    ),
    Message(
        _RANK_ZERO,
        r"The following callbacks returned in `LightningModule\.configure_callbacks` will override existing callbacks "
        r"passed to Trainer: ((ChannelsLast|ExactAccumulation|SkippedStepSchedule|SynchronizedBuffers)(, |$))+$",
        "the callbacks of LitClassifier replace themselves in the test after the training",
    ),
)


def hide_messages(messages: Iterable[Message] = (*OF_LIT_TRAINER, *OF_RUNS)) -> None:
    """Hides messages in this process; more calls change nothing."""
    for message in messages:
        if message.source == WARNINGS:
            warnings.filterwarnings("ignore", message=message.pattern)
        else:
            for package in PACKAGES:
                logging.getLogger(message.source.replace("lightning.pytorch", package)).addFilter(message)


class _StandardError:
    """The standard error as it is when a message is written: a progress bar replaces it while it is shown."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def write_beside_the_bar() -> None:
    """Lets Lightning's log appear above a progress bar instead of in its line."""
    for name in PACKAGES:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.__stderr__):
                handler.setStream(_StandardError())
