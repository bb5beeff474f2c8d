"""The command with a LightningModule of the user: `lit-mnist fit --config mine.yaml --import my_package`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from conftest import Program, result_of
from lightning.pytorch import Trainer
from processes import ROOT, assert_rejected, kill, wait_for
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from lit_mnist.plugins import ExactDistributedSampler
from lit_mnist.plugins.global_batch import describe_global_batch
from lit_mnist.run.metrics_log import read_metrics

# Runs a command in this process, and prints the modules of the project that it has imported.
IMPORTS = """
import sys
from lit_mnist.cli.main import main
if __name__ == "__main__":
    code = main(sys.argv[1:])
    print("imported:", *(name for name in sys.modules if name.startswith("lit_mnist.")))
    sys.exit(code)
"""
# What only a run of MNIST imports, and what only a run of a user module imports.
OF_MNIST = (
    *("cli.experiment_", "data.", "datamodule", "engines.classifier", "engines.device_checks", "experiment."),
    *("models.", "module", "predict", "training."),
)
OF_A_USER = ("cli.given", "cli.lightning_cli", "cli.option_checks", "cli.plain_errors", "cli.user_target")
SPIRALS = ("--config", "spirals.yaml", "--import", "spirals")
BASE: dict[str, Any] = {"model": {"class_path": "spirals.SpiralsModule"}, "data": {"class_path": "spirals.SpiralsData"}}

EVIL = """
from pathlib import Path
Path(__file__).with_name("marker").write_text("imported")
from lightning.pytorch import LightningModule
class Lit(LightningModule):
    pass
def call(*args):
    Path(__file__).with_name("marker").write_text("called")
"""
PLAIN = """
import subprocess
import time
from subprocess import Popen
from collections.abc import Callable
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

class Count(Callback):
    def __init__(self, size: int = 1):
        self.size = size


class Reject(Callback):
    def setup(self, trainer, pl_module, stage):
        raise MisconfigurationException("there is nothing to call back")

class Lit(LightningModule):
    def __init__(
        self,
        factor: float = 1.0,
        fail: bool = False,
        call: Callable = torch.nn.ReLU,
        part: torch.nn.Module | None = None,
        other=None,
        pause: float = 0.0,
    ):
        super().__init__()
        self.layer, self.factor, self.fail, self.pause = torch.nn.Linear(3, 1), factor, fail, pause
    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)
        if self.fail and self.global_rank == self.trainer.world_size - 1 and batch_idx == 2:
            raise RuntimeError("the module is broken")
        loss = (self.layer(batch[0]) * self.factor).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 3)), 4, shuffle=True)
"""

DEFAULTS = """
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
import torch
from torchmetrics import MeanSquaredError
import plain

class Part(torch.nn.Module):
    def __init__(self, size: int = 3, cast: Callable = float, kind: type = dict):
        super().__init__()

class Lit(plain.Lit):
    def __init__(
        self,
        loss_cls: type = torch.nn.MSELoss,
        cast: Callable = float,
        show: Callable = print,
        power: Callable = partial(math.pow, 2),
        metric: type = MeanSquaredError,
        activation: Callable = torch.nn.ReLU(),
        dtype: torch.dtype = torch.float32,
        place: Path = Path("x"),
        casts: list[Callable] = [float, int],
        size: tuple = (1, 2),
        layer: torch.nn.Module | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        assert (cast, dtype, casts, size) == (float, torch.float32, [float, int], (1, 2))
"""


@pytest.fixture
def spirals(program: Program) -> Program:
    """The command in a folder with three packages of a user, one of them not trusted."""
    for name in ("spirals", "spirals.yaml"):
        source = ROOT / "examples" / "user_module" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, program.folder / name)
    (program.folder / "list.yaml").write_text("model: {init_args: [3]}\n")
    (program.folder / "plain.py").write_text(PLAIN)
    (program.folder / "defaults.py").write_text(DEFAULTS)
    (program.folder / "nested" / "nested").mkdir(parents=True)
    (program.folder / "nested" / "nested" / "__init__.py").touch()
    for name in ("evil", "spirals_evil"):
        (program.folder / name).mkdir()
        (program.folder / name / "__init__.py").write_text(EVIL)
    return program


def same(one: Path, other: Path) -> None:
    """Asserts that two runs have bit-identical weights and equal metrics."""
    first, second = result_of(one), result_of(other)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert (first["steps"], first["validation"], first["test"]) == (
        second["steps"],
        second["validation"],
        second["test"],
    )
    assert _logged(one) == _logged(other)


def _logged(folder: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "images_per_s"} for row in read_metrics(folder)]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_module_of_the_user_is_trained_and_tested(spirals: Program, devices: int) -> None:
    folder = spirals.train(*SPIRALS, "--devices", devices, "--model.hidden", 16, "--epochs", 2)
    result = result_of(folder)
    assert result["engine"] == "lightning"
    assert result["model"] == "spirals.SpiralsModule"
    assert (result["world_size"], result["precision"], result["epochs"]) == (devices, "32-true", 2)
    assert result["steps"] == 2 * 576 // 16 // devices
    assert result["validation"].keys() == {"val_loss", "val_accuracy"}
    assert result["test"].keys() == {"test_loss", "test_accuracy"}
    assert result["config"]["model"]["init_args"]["hidden"] == 16
    columns = {name for row in read_metrics(folder) for name in row}
    assert columns == {"step", "epoch", "train_loss", "images_per_s", "val_loss", "val_accuracy"}
    page = (folder / "report.html").read_text()
    assert "SpiralsModule" in page
    assert page.count('<figure class="plot">') == 3
    assert {path.name for path in (folder / "logs").glob("rank-*.log")} == {f"rank-{n}.log" for n in range(devices)}
    assert list((folder / "tensorboard").iterdir())


def test_each_command_names_the_next_one_which_works(spirals: Program) -> None:
    folder = spirals.train(*SPIRALS, "--max-steps", 3, "--trainer.enable_progress_bar", "false")
    words, named = ["validate", "--ckpt", folder, "--import", "spirals"], []
    for _ in range(3):
        done = spirals(*words)
        assert done.code == 0, done.out + done.err
        label, _, following = done.out.splitlines()[-1].partition(" ")
        named.append(label)
        if label != "use":
            assert following.split()[:2] == ["lit-mnist", label]
            words = following.split()[1:]
    assert named == ["test", "predict", "use"]


def test_a_module_without_a_test_names_none(spirals: Program) -> None:
    done = spirals("fit", "--model", "plain.Lit", "--import", "plain", "--max-steps", 2)
    assert done.code == 0, done.out + done.err
    following = done.out.splitlines()[-1]
    assert following.startswith("open      python -m webbrowser ")
    assert (spirals.folder / following.split()[-1]).is_file()


def test_a_data_module_states_the_digest_of_its_data(spirals: Program) -> None:
    code = """
from spirals import SpiralsData
class Stated(SpiralsData):
    def setup(self, stage):
        super().setup(stage)
        self.sha256 = "0a" * 32
"""
    (spirals.folder / "stated.py").write_text(code)
    words = (*SPIRALS, "--import", "stated", "--data.class_path", "stated.Stated", "--max-steps", 2)
    assert result_of(spirals.train("fit", *words))["data"] == {
        "name": "stated.Stated",
        "source": None,
        "sha256": "0a" * 32,
    }
    assert result_of(spirals.train("fit", *SPIRALS, "--max-steps", 2))["data"]["sha256"] is None


def test_a_configuration_names_the_classes_of_the_template_without_an_import(spirals: Program) -> None:
    config = {
        "model": {"class_path": "lit_mnist.module.LitClassifier"},
        "data": {"class_path": "lit_mnist.datamodule.MNISTDataModule"},
    }
    (spirals.folder / "template.yaml").write_text(yaml.safe_dump(config))
    result = result_of(spirals.train("fit", "--config", "template.yaml", "--max-steps", 2))
    assert result["model"] == "lit_mnist.module.LitClassifier"


def test_the_configuration_of_a_run_repeats_it(spirals: Program) -> None:
    folder = spirals.train("fit", *SPIRALS, "--max-steps", 10)
    again = spirals.train("fit", "--config", folder / "config.yaml", "--import", "spirals")
    same(folder, again)


LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lit_mnist.cli.main"),
    "spawn": ("-m", "lit_mnist.cli.main", "--devices", "2", "--launcher", "spawn"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
@pytest.mark.usefixtures("forked_python")
def test_it_runs_under_other_launchers(spirals: Program, launcher: str) -> None:
    folder = spirals.folder / "outside"
    subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *SPIRALS, "--epochs", "1", "--run-dir", str(folder)],
        cwd=spirals.folder, check=True, timeout=180, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    inside = spirals.train(*SPIRALS, "--epochs", 1, "--devices", 2)
    assert result_of(folder)["weights_sha256"] == result_of(inside)["weights_sha256"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trace_has_the_samples_and_weights_of_each_step(spirals: Program, devices: int) -> None:
    folder = spirals.train("fit", *SPIRALS, "--max-steps", 3, "--devices", devices, "--run.trace", "steps")
    traces = [json.loads(path.read_text()) for path in sorted((folder / "trace").glob("rank-?.json"))]
    assert len(traces) == devices
    assert all([step["step"] for step in trace["steps"]] == [1, 2, 3] for trace in traces)
    assert len({json.dumps(trace["steps"][-1]["weights"]) for trace in traces}) == 1
    assert len({trace["steps"][0]["samples"] for trace in traces}) == devices


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_run_resumes_bit_identically(spirals: Program, devices: int) -> None:
    flags = ("fit", *SPIRALS, "--devices", devices, "--epochs", 2)
    whole = spirals.train(*flags)
    folder = spirals.folder / "killed"
    failed = spirals(*flags, "--save-every", 5, "--inject", f"kill:rank={devices - 1},step=24", "--run-dir", folder)
    if devices == 1:
        assert failed.code == -signal.SIGKILL
    else:
        assert failed.code == 3, failed.err
        assert "Rank 1" in failed.err
        assert "resume with: " in failed.err
        assert "--import spirals" in failed.err
    done = spirals("fit", "--resume", folder, "--import", "spirals")
    assert done.code == 0, done.out + done.err
    assert "after step 20" in done.out
    same(whole, folder)


@pytest.mark.slow
def test_a_lost_rank_is_restarted(spirals: Program) -> None:
    flags = ("fit", *SPIRALS, "--devices", 2, "--epochs", 2, "--save-every", 10)
    whole = spirals.train(*flags)
    folder = spirals.train(*flags, "--max-restarts", 1, "--inject", "kill:rank=1,step=25")
    same(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_signal_saves_and_ends_the_run(spirals: Program, devices: int) -> None:
    flags = ("fit", "--model", "plain.Lit", "--import", "plain", "--epochs", 2, "--devices", devices)
    slow = ("--model.pause", 0.1)
    whole = spirals.train(*flags, *slow)
    folder = spirals.folder / "stopped"
    with spirals.started(*flags, *slow, "--run-dir", folder, "--save-every", "1s") as group:
        wait_for(lambda: list(folder.glob("checkpoints/last.ckpt")), 60, spirals.folder)
        kill(group, signal.SIGTERM)
        _, status = wait_for(lambda: _ended(group), 20, spirals.folder)
    assert os.waitstatus_to_exitcode(status) == 143
    assert "Stopped by SIGTERM after step" in (spirals.folder / "stderr.txt").read_text()
    done = spirals(*flags, *slow, "--run-dir", folder, "--resume", "auto")
    assert done.code == 0, done.out + done.err
    same(whole, folder)


def _ended(child: int) -> tuple[int, int] | None:
    found, status = os.waitpid(child, os.WNOHANG)
    return (found, status) if found else None


def test_evaluations_and_predictions(spirals: Program) -> None:
    folder = spirals.train(*SPIRALS, "--epochs", 1)
    for command in ("test", "validate"):
        words = (command, "--ckpt", folder, "--import", "spirals")
        evaluated = result_of(spirals.train(*words))
        key = "validation" if command == "validate" else "test"
        assert evaluated[key] == result_of(folder)[key]
        assert evaluated["weights_sha256"] == result_of(folder)["weights_sha256"]
    for devices in (1, 2):
        predicted = spirals.train("predict", "--ckpt", folder, "--import", "spirals", "--devices", devices)
        rows = torch.load(predicted / "predictions.pt", weights_only=True)
        assert sorted(index for row in rows for index in row["indices"]) == list(range(192))
        assert sum(len(row["output"]) for row in rows) == 192


def test_metrics_do_not_depend_on_the_number_of_ranks(spirals: Program) -> None:
    """With 101 samples, the ranks have unequal parts. What is not exact is stated, and what would be."""
    folder = spirals.train("fit", *SPIRALS, "--data.size", "505", "--max-steps", 5)
    results = []
    for ranks in (1, 3):
        results.append(result_of(spirals.train("test", "--ckpt", folder, "--import", "spirals", "--devices", ranks)))
    assert [(result["exact"], result["exact_reasons"]) for result in results] == [(True, [])] * 2
    assert len({result["test"]["test_accuracy"] for result in results}) == 1
    assert all(result["test"] == pytest.approx(results[0]["test"], rel=1e-6) for result in results)
    limit = ("--devices", 2, "--trainer.limit_test_batches", 2, "--run-dir", spirals.folder / "limited")
    done = spirals("test", "--ckpt", folder, "--import", "spirals", *limit)
    result = result_of(spirals.folder / "limited")
    assert (done.code, result["exact"]) == (0, False)
    assert result["exact_reasons"] == ["limit_test_batches counts the batches of each rank: remove it"]
    assert f"note: not exact, these metrics depend on the number of ranks: {result['exact_reasons'][0]}" in done.out


def test_a_loss_that_is_not_finite_ends_the_run(spirals: Program) -> None:
    done = spirals("fit", "--model", "plain.Lit", "--import", "plain", "--model.factor", 1e30, "--devices", 2)
    assert done.code == 4, done.out + done.err
    assert "The loss was inf in step 1 on ranks 0, 1: lower --lr, or find the operation" in done.err


def test_a_module_that_raises_ends_the_run_with_its_traceback(spirals: Program) -> None:
    done = spirals("fit", "--model", "plain.Lit", "--import", "plain", "--model.fail", "true", "--devices", 2)
    assert done.code == 3, done.out + done.err
    assert "Rank 1" in done.err
    assert "in step 3" in done.err
    assert "RuntimeError: the module is broken" in done.err


def test_options_of_lightning_are_accepted(spirals: Program) -> None:
    best = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitor": "val_loss"}}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv"}}
    flags = ("--trainer.callbacks", json.dumps([best]), "--trainer.logger", json.dumps(logger))
    folder = spirals.train(*SPIRALS, *flags, "--epochs", 2, "--trainer.gradient_clip_algorithm", "value")
    assert list((folder / "model_checkpoints").glob("*.ckpt"))
    assert list((spirals.folder / "csv").rglob("metrics.csv"))


HOSTILE: dict[str, dict[str, Any]] = {
    "a function of the system": {"model": {"class_path": "os.system", "init_args": {"command": "touch marker"}}},
    "a process": {"model": {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "marker"]}}},
    "eval": {"model": {"class_path": "builtins.eval"}},
    "a package that was not named": {"model": {"class_path": "evil.Lit"}},
    "a package whose name begins alike": {"model": {"class_path": "spirals_evil.Lit"}},
    "another package's data": {"data": {"class_path": "evil.Lit"}},
    "a nested class": {"model": {"class_path": "plain.Lit", "init_args": {"part": {"class_path": "evil.Lit"}}}},
    "a nested class of any": {"model": {"class_path": "plain.Lit", "init_args": {"other": {"class_path": "evil.Lit"}}}},
    "a class in a list": {"model": {"class_path": "plain.Lit", "init_args": {"other": [{"class_path": "evil.Lit"}]}}},
    "a class in a text": {"model": {"class_path": "plain.Lit", "init_args": {"part": "{class_path: evil.Lit}"}}},
    "a callable as text": {"model": {"class_path": "plain.Lit", "init_args": {"call": "evil.call"}}},
    "a function of the system as text": {"model": {"class_path": "plain.Lit", "init_args": {"call": "os.system"}}},
    "a module that the package imports": {"model": {"class_path": "plain.subprocess.Popen"}},
    "a class that the package imports": {"model": {"class_path": "plain.Lit", "init_args": {"call": "plain.Popen"}}},
    "a callback": {"trainer": {"callbacks": [{"class_path": "evil.Lit"}]}},
    "a callback as text": {"trainer": {"callbacks": "evil.Lit"}},
    "a logger": {"trainer": {"logger": {"class_path": "evil.Lit"}}},
    "an import": {"import": "evil"},
    "an import of the run": {"run": {"import": "evil"}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_configuration_is_rejected_before_an_import(spirals: Program, name: str) -> None:
    config = {**BASE, **HOSTILE[name]}
    (spirals.folder / "hostile.yaml").write_text(yaml.safe_dump(config))
    done = spirals("fit", "--config", "hostile.yaml", "--import", "spirals,plain", "--run-dir", "run")
    assert_rejected(done)
    assert not list(spirals.folder.rglob("marker"))
    assert not (spirals.folder / "run").exists()


EXACT = {"class_path": "lit_mnist.plugins.ExactCheckpoint", "init_args": {"dirpath": "x"}}
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "no import": (("--config", "spirals.yaml"), "--import spirals"),
    "an unknown argument": ((*SPIRALS, "--model.hiden", 3), "did you mean --model.hidden?"),
    "an unknown argument of the data": ((*SPIRALS, "--data.batchsize", 3), "did you mean --data.batch_size?"),
    "an unknown nested argument": (
        ("--model", "defaults.Lit", "--import", "defaults", "--model.layer", "defaults.Part", "--model.layer.siz", 1),
        "model.layer.siz: Part has no argument siz; did you mean --model.layer.size?",
    ),
    "a misspelt class of torch": ((*SPIRALS, "--model.activation", "torch.nn.Tanhh"), "did you mean torch.nn.Tanh?"),
    "a class of torch that is not allowed": (
        (*SPIRALS, "--model.activation", "torch.hub.load"),
        "model.activation names torch.hub.load: a configuration may name what is defined in lightning.pytorch.",
    ),
    "a package that does not exist": (
        ("--model", "spirals.SpiralsModule", "--import", "spiralz"),
        "--import spiralz: there is no such package; did you mean spirals?",
    ),
    "a folder around a package": (("--model", "nested.Lit", "--import", "nested"), "Run the command from that folder."),
    "a package unlike any": (("--model", "abc.Lit", "--import", "zzz"), "--import zzz: there is no such package. Run"),
    "a given callable of another package": (
        ("--model", "defaults.Lit", "--import", "defaults", "--model.cast", "math.sqrt"),
        "math.sqrt",
    ),
    "a callback of the run": (
        (*SPIRALS, "--import", "lit_mnist", "--trainer.callbacks", json.dumps([EXACT])),
        "trainer.callbacks names ExactCheckpoint",
    ),
    "an argument of another type": ((*SPIRALS, "--model.hidden", "many"), "hidden"),
    "an option of the experiment": ((*SPIRALS, "--lr", 0.1), "--lr"),
    "the batch size of the experiment": ((*SPIRALS, "--batch-size", 8), "--batch-size"),
    "a network of the experiment": ((*SPIRALS, "--model.net", "basicnet"), "net"),
    "a launcher of one rank": ((*SPIRALS, "--launcher", "spawn"), "run.launcher"),
    "a graph": ((*SPIRALS, "--run.cuda_graph", "true"), "run.cuda_graph is not accepted for your module"),
    "a callback that cannot be made": (
        (*SPIRALS, "--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: a, mode: sideways}}]"),
        "trainer.callbacks: `mode` can be min, max, got sideways.",
    ),
    "a trial": ((*SPIRALS, "--trainer.fast_dev_run", "true"), "use --max-steps"),
    "a contradiction": ((*SPIRALS, "--epochs", 1, "--trainer.max_epochs", 2), "contradicts"),
    "arguments that are a list": ((*SPIRALS, "--config", "list.yaml"), "model.init_args"),
    "an unknown class": ((*SPIRALS, "--model", "spirals.Nothing"), "spirals.Nothing"),
    "a class that is no module": ((*SPIRALS, "--model", "spirals.SpiralsData"), "SpiralsData"),
    "an unknown option of the Trainer": ((*SPIRALS, "--trainer.epochs", 3), "trainer.epochs"),
    "a plugin": ((*SPIRALS, "--trainer.plugins", "[]"), "trainer.plugins"),
    "a fault of a missing rank": ((*SPIRALS, "--inject", "kill:rank=3,step=1"), "ranks are 0 to 0"),
    "images": ((*SPIRALS, "--images", "a.png"), "--images"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_rejected_with_one_message(spirals: Program, name: str) -> None:
    words, part = WRONG[name]
    done = spirals("fit", *words, "--run-dir", "run")
    assert_rejected(done, part)
    assert not (spirals.folder / "run").exists()


@pytest.mark.parametrize(("words", "engine"), [(("fit", *SPIRALS), "raw_ddp"), (("compare", *SPIRALS), "lightning")])
def test_what_trains_only_the_experiment_rejects_the_user_s_classes(
    spirals: Program, words: tuple[str, ...], engine: str
) -> None:
    assert_rejected(spirals(*words, engine=engine), "trains this project's networks only")


def test_a_flag_for_training_is_rejected_with_an_evaluation(spirals: Program) -> None:
    done = spirals("test", "--ckpt", "nowhere", *SPIRALS, "--epochs", 3)
    assert_rejected(done, "--epochs has no effect, because test does not train: remove it.")


def test_only_a_registered_network_is_exported(spirals: Program) -> None:
    folder = spirals.train("fit", *SPIRALS, "--max-steps", 2)
    done = spirals("export", "--ckpt", folder, "--import", "spirals", "--to", "pt2", "--output", "spirals.pt2")
    assert_rejected(done, "is of a run of the module spirals.SpiralsModule", "SpiralsModule.load_from_checkpoint")


def test_a_resumed_run_keeps_its_model_and_its_ranks(spirals: Program) -> None:
    folder = spirals.train("fit", *SPIRALS, "--max-steps", 5)
    done = spirals("fit", "--resume", folder, "--import", "spirals", "--model.hidden", 8)
    assert_rejected(done, "model.init_args.hidden")
    done = spirals("fit", "--resume", folder, "--import", "spirals", "--trainer.limit_train_batches", 3)
    assert_rejected(done, "trainer.limit_train_batches is 3 here, but None in", "remove it")
    done = spirals("fit", "--resume", folder, "--import", "spirals", "--max-steps", 10, "--devices", 2)
    assert_rejected(done, "saved by 1 rank,", "use 1 device")
    # Where, how long and with how many threads it runs may change; threads change the rounding, which is stated.
    before = result_of(folder)["threads"]
    done = spirals("fit", "--resume", folder, "--import", "spirals", "--max-steps", 7, "--run.threads", before + 1)
    assert done.code == 0, done.out + done.err
    assert f"uses {before + 1} threads, but {before} before (run.threads is {before + 1})" in done.out


def test_a_complete_run_is_not_resumed_and_keeps_its_result(spirals: Program) -> None:
    """The fixture compares all files after each rejected command."""
    folder = spirals.train("fit", *SPIRALS, "--max-steps", 5)
    words = ("fit", "--import", "spirals")
    for others in (("--resume", folder), ("--config", "spirals.yaml", "--run-dir", folder, "--resume", "auto")):
        again = () if others[0] == "--resume" else ("--max-steps", 5)
        assert_rejected(spirals(*words, *others, *again), "has completed its 5 steps: there is nothing to resume")
        assert_rejected(spirals(*words, *others, "--max-steps", 4), "has completed its 5 steps")
    # A run whose test was interrupted is tested, and one that becomes longer is trained.
    (folder / "result.json").unlink()
    assert spirals(*words, "--resume", folder).code == 0
    assert result_of(folder)["steps"] == 5
    assert spirals(*words, "--resume", folder, "--max-steps", 7).code == 0
    assert result_of(folder)["steps"] == 7


def test_a_resumed_run_keeps_the_callbacks_that_change_the_training(spirals: Program) -> None:
    observer = "lightning.pytorch.callbacks.LearningRateMonitor"

    def twice(after: int) -> dict[str, Any]:
        scheduling = {"init_args": {"scheduling": {after: 2}}}
        return {"class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler", **scheduling}

    folder = spirals.train("fit", *SPIRALS, "--max-steps", 5, "--trainer.callbacks", json.dumps([twice(0)]))
    words = ("fit", "--resume", folder, "--import", "spirals", "--import", "plain", "--max-steps", 7)
    for given in ([], [observer], [twice(1)]):
        done = spirals(*words, "--trainer.callbacks", json.dumps(given))
        assert_rejected(done, "GradientAccumulationScheduler", "which changes the training")
    own = {"class_path": "plain.Count", "init_args": {"size": 3}}
    done = spirals(*words, "--trainer.callbacks", json.dumps([twice(0), observer, own]))
    assert done.code == 0, done.out + done.err
    assert "plain.Count" in done.out
    assert "is not bit-identical to an uninterrupted one if this callback changes the training" in done.out
    assert 'has "lightning' not in done.out


def test_defaults_that_are_classes_or_functions_are_accepted(spirals: Program) -> None:
    flags = ("--model", "defaults.Lit", "--model.layer", "defaults.Part", "--import", "defaults")
    folder = spirals.train("fit", *flags, "--max-steps", 2)
    written = result_of(folder)["config"]["model"]["init_args"]
    assert written["layer"] == {"class_path": "defaults.Part", "init_args": {"size": 3}}
    # What a file cannot state exactly is left to the class.
    assert not {"cast", "show", "dtype", "casts", "size"} & written.keys()
    done = spirals("fit", "--resume", folder, "--import", "defaults", "--max-steps", 4)
    assert done.code == 0, done.out + done.err


def test_what_the_ranks_reject_changes_nothing(spirals: Program) -> None:
    """The fixture compares all files. A killed run's lock file names its process."""
    best = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    folder = spirals.train("fit", *SPIRALS, "--max-steps", 5, "--trainer.callbacks", json.dumps([best]))
    (folder / "run.lock").write_text("process 1 on nowhere\n")
    words = ("fit", "--resume", folder, "--import", "spirals", "--max-steps", 9)
    assert_rejected(spirals(*words, "--devices", 2), "saved by 1 rank,")
    other = next((folder / "model_checkpoints").iterdir())
    assert_rejected(spirals("fit", *SPIRALS, "--resume", other), "was not saved by ExactCheckpoint")
    done = spirals(*words, "--import", "plain", "--trainer.callbacks", "plain.Reject")
    assert done.code == 2, done.out + done.err
    assert "Lightning rejects the run" in done.err
    assert_rejected(spirals("test", "--ckpt", "nowhere", "--import", "spirals", "--model", "spirals.SpiralsModule"))
    done = spirals("test", "--ckpt", folder, "--import", "spirals", "--model.hidden", 8)
    assert_rejected(done, "does not fit the module")
    done = spirals(*words)
    assert done.code == 0, done.out + done.err
    assert "process 1 on nowhere) was killed" in done.out


def test_two_processes_do_not_resume_one_folder(spirals: Program) -> None:
    flags = ("--import", "plain", "--model.pause", 0.5)
    folder = spirals.train("fit", "--model", "plain.Lit", *flags, "--max-steps", 2)
    second = Program(spirals.folder / "second")
    second.folder.mkdir()
    words = ("fit", "--resume", folder, *flags, "--max-steps", 12)
    with spirals.started(*words) as first:
        wait_for(lambda: f"process {first} " in (folder / "run.lock").read_text(), 60, spirals.folder)
        shutil.copy(spirals.folder / "plain.py", second.folder)
        done = second(*words)
        assert_rejected(done, f"in use by process {first} on ")
        _, status = wait_for(lambda: _ended(first), 100, spirals.folder)
    assert status == 0
    assert result_of(folder)["steps"] == 12


def test_the_global_batch_is_printed(spirals: Program) -> None:
    words = ("fit", *SPIRALS, "--max-steps", 1, "--trainer.accumulate_grad_batches", 2, "--devices", 2)
    done = spirals(*words, "--run-dir", "run")
    assert done.out.count("note: global batch 64 = 2 ranks x 16 (x 2 accumulated)\n") == 1, done.out


@pytest.mark.parametrize(
    ("loaders", "line"),
    [
        (lambda data: DataLoader(data, 4), "global batch 4 = 1 rank x 4"),
        (lambda data: {"a": DataLoader(data, 4), "b": DataLoader(data, 2)}, "global batch 6 = 1 rank x (4 + 2)"),
        (lambda data: DataLoader(data, batch_sampler=BatchSampler(range(8), 3, False)), "global batch 3 = 1 rank x 3"),
        (lambda data: DataLoader(data, batch_sampler=ExactDistributedSampler(data, 8)), "global batch 8 = 1 rank x 8"),
        (lambda data: DataLoader(data, batch_sampler=[[0], [1, 2]]), "unknown: list decides the size"),
        (lambda data: DataLoader(data, batch_size=None), "unknown: "),
        (lambda data: [[1], [2]], "unknown: "),
    ],
)
def test_the_global_batch_of_loaders(loaders: Callable[[Dataset[Any]], Any], line: str) -> None:
    trainer = SimpleNamespace(
        train_dataloader=loaders(TensorDataset(torch.zeros(16, 1))), world_size=1, accumulate_grad_batches=1
    )
    assert line in describe_global_batch(cast(Trainer, trainer))


def test_a_wrong_flag_does_not_import_torch() -> None:
    code = (
        "import sys; from lit_mnist.cli.main import main; "
        "code = main(['fit', '--model', 'spirals.Lit', '--import', 'spirals', '--lr', '1']); "
        "sys.exit(10 * ('torch' in sys.modules) + code)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 2


@pytest.mark.slow
def test_one_run_system_trains_mnist_and_a_user_module(spirals: Program) -> None:
    (spirals.folder / "imports.py").write_text(IMPORTS)

    def imported(*words: object) -> set[str]:
        command = [sys.executable, "imports.py", *map(str, words), "--max-steps", "6", "--save-every", "3"]
        done = subprocess.run(
            command, cwd=spirals.folder, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("imported: ")]
        return {name.removeprefix("lit_mnist.") for name in line.split()[1:]}

    mnist = imported("fit", "--data.train_size", 500, "--run-dir", "mnist")
    user = imported("fit", *SPIRALS, "--run-dir", "user")
    assert [name for name in sorted(mnist - user) if not name.startswith(OF_MNIST)] == []
    assert [name for name in sorted(user - mnist) if not name.startswith(OF_A_USER)] == []
    # What trains, saves, resumes and records is in both.
    assert {"engines.lightning", "run.job", "run.result", "cli.launch", "cli.claim", "cli.resume"} <= mnist & user
    assert {f"plugins.recording.{name}" for name in ("checkpoint", "logger", "monitor", "results")} <= mnist & user
