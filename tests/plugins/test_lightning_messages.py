"""Lightning's messages that do not apply are hidden, each by its name; all others come through."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Program
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core import rank_zero as rank_zero_module

from lit_mnist.plugins.lightning_messages import OF_LIT_TRAINER, OF_RUNS, PACKAGES, WARNINGS, Message, hide_messages
from lit_mnist.trainer import LitTrainer

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
LOGGERS = {
    message.source.replace("lightning.pytorch", package)
    for message in (*OF_LIT_TRAINER, *OF_RUNS)
    for package in PACKAGES
}


class Noisy(BoringModel):
    """A module that logs and warns."""

    def on_train_start(self) -> None:
        """Logs and warns."""
        rank_zero_info("a note of the module")
        rank_zero_warn("a warning of the module")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Logs the loss."""
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def logged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Lightning's loggers pass on, with their filters as they are before, whichever package was imported last."""
    monkeypatch.setattr(rank_zero_module, "log", logging.getLogger(f"{request.param}.utilities.rank_zero"))
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in LOGGERS - {WARNINGS}]
    before = [(logger, list(logger.filters)) for logger in loggers]
    for logger in loggers:
        logger.filters.clear()
    packages = [(logging.getLogger(package), logging.getLogger(package).level) for package in PACKAGES]
    for logger, _ in packages:
        logger.addHandler(handler)
        # As each package sets it when it is imported, and other tests do not. A logger remembers what it lets through
        # until `setLevel` is called.
        logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        yield found
    for logger, level in packages:
        logger.removeHandler(handler)
        logger.setLevel(level)
    for logger, filters in before:
        logger.filters[:] = filters


def hidden(texts: list[str], messages: tuple[Message, ...]) -> list[str]:
    """Returns the texts that are in a table."""
    records = [logging.makeLogRecord({"msg": text}) for text in texts]
    return [record.msg for record in records if not all(message.filter(record) for message in messages)]


def test_what_lightning_logs_today_is_in_the_table(logged: list[str]) -> None:
    Trainer(accelerator="cpu", devices=1, max_steps=1, limit_val_batches=1.0, **QUIET).fit(BoringModel())
    found = [text.strip() for text in logged]
    assert len(hidden(found, OF_LIT_TRAINER)) == 3, found
    assert [text.split()[:2] for text in hidden(found, OF_RUNS)] == [
        ["`Trainer(limit_val_batches=1.0)`", "was"],
        ["`Trainer.fit`", "stopped:"],
    ]


def test_a_lit_trainer_hides_what_does_not_apply_and_nothing_else(logged: list[str]) -> None:
    stopping = EarlyStopping("loss", verbose=True, check_on_train_epoch_end=True)
    trainer = LitTrainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[stopping], **QUIET)
    with pytest.warns(UserWarning, match="a warning of the module"):
        trainer.fit(Noisy())
    assert hidden(logged, OF_LIT_TRAINER) == []
    assert "a note of the module" in logged
    assert any("stopped: `max_steps=2` reached" in text for text in logged), logged
    assert any("Metric loss improved" in text for text in logged), logged


def test_a_run_hides_what_the_command_says_itself(logged: list[str]) -> None:
    hide_messages()
    hide_messages()
    with pytest.warns(UserWarning, match="a warning of the module") as warned:
        LitTrainer(accelerator="cpu", devices=1, max_steps=2, limit_val_batches=1.0, **QUIET).fit(Noisy())
    assert logged == ["a note of the module"]
    assert not [one for one in warned if "LeafSpec" in str(one.message)]
    assert logging.getLogger("lightning.pytorch").level <= logging.INFO


def test_a_warning_of_a_user_module_is_shown(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest would record the warnings that are not hidden.
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
    (program.folder / "noisy.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from lightning.pytorch.utilities import rank_zero_warn\n"
        "class Lit(BoringModel):\n"
        "    def on_train_start(self):\n"
        "        rank_zero_warn('unknown to the table')\n"
    )
    done = program("fit", "--model", "noisy.Lit", "--import", "noisy", "--max-steps", 2)
    assert done.code == 0, done.out + done.err
    assert "unknown to the table" in done.err
    assert hidden(done.err.splitlines() + done.out.splitlines(), (*OF_LIT_TRAINER, *OF_RUNS)) == []
    assert "LeafSpec" not in done.err
    assert "logging interval" not in done.err
