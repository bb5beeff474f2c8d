"""Each example runs, and does what its docstring says."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import ROOT
from lightning.pytorch import Trainer

from examples import checkpoints, collectives, export, gather_predictions
from lit_mnist.errors import InputError
from lit_mnist.module import LitClassifier
from lit_mnist.plugins import PortableSyncBatchNorm

sys.path.insert(0, str(ROOT / "examples"))
from segmentation import LitSegmentation, SegmentationData, data_parallel
from segmentation.data import Shapes

pytestmark = pytest.mark.timeout(180)
Ranks = Callable[..., list[Any]]
SHAPES = ROOT / "examples" / "segmentation" / "shapes.yaml"
SMALL = [f"--data.{option}" for option in ("train_size=40", "val_size=7", "test_size=11", "size=32", "batch_size=8")]


def run(*words: object, timeout: float = 120, **environment: str) -> str:
    """Runs a command, and returns its output; it must succeed, and nothing that it started is left."""
    process = subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def torchrun(*words: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]


# --- the collective operations


def test_collectives_show_what_each_rank_holds(ranks: Ranks) -> None:
    shown = ranks(3, collectives.main)[0]
    after = {name: [row[1] for row in rows] for name, rows in shown.items()}
    everything = "[1, 2] [11, 12] [21, 22]"
    assert after.pop("barrier") == ["continues after 0.2 s"] * 3
    assert after == {
        "broadcast": ["[1, 2]"] * 3,
        "all_reduce": ["[33, 36]"] * 3,
        "reduce": ["[33, 36]", "-", "-"],
        "all_gather": [everything] * 3,
        "reduce_scatter": ["[33, 36]", "[39, 42]", "[45, 48]"],
        "scatter": ["[1, 2]", "[3, 4]", "[5, 6]"],
        "gather": [everything, "-", "-"],
        "all_to_all": ["[1, 11, 21]", "[2, 12, 22]", "[3, 13, 23]"],
        "send_and_receive": ["[21, 22]", "[1, 2]", "[11, 12]"],
    }


def test_predictions_are_gathered_in_order(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for count in (1, 3):
        ranks(count, gather_predictions.main, tmp_path / "predictions.pt")
        found.append(torch.load(tmp_path / "predictions.pt"))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    assert len(found[0]) == gather_predictions.SAMPLES


def test_all_ranks_load_what_rank_0_saved_and_a_timeout_names_the_lost_one(ranks: Ranks, tmp_path: Path) -> None:
    (equal, message), (other_equal, _) = ranks(2, checkpoints.main, tmp_path / "checkpoint.pt")
    assert equal
    assert other_equal
    assert "Rank 1" in message


# --- segmentation


def segment() -> tuple[dict[str, float], torch.Tensor]:
    """Returns the metrics and the weights of a small training under a stock Trainer, in 64 bits."""
    world_size = dist.get_world_size()
    module = LitSegmentation(4, lr=0.05, seed=1)
    data = SegmentationData(batch_size=6, val_size=7, size=32, train_size=31, test_size=11, seed=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        precision="64-true",
        plugins=[PortableSyncBatchNorm()],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    return metrics | tested, torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def test_segmentation_trains_and_evaluates_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    expected, weights = ranks(1, segment)[0]
    assert expected.keys() == {"train_loss", "val_loss", "val_mean_iou", "test_loss", "test_mean_iou"}
    for count in (2, 3):
        for metrics, others in ranks(count, segment):
            torch.testing.assert_close(others, weights, rtol=0, atol=1e-8)
            assert metrics == pytest.approx(expected, rel=1e-6)


def test_data_parallel_trains_what_ddp_trains(ranks: Ranks) -> None:
    options = ["--double", "--size", "32", "--batch-size", "2", "--steps", "1"]
    assert ranks(2, data_parallel.main, options)[0] < 1e-10


def test_segmentation_runs_on_the_command(command: Callable[..., Any]) -> None:
    completed = command("--config", SHAPES, *SMALL, "--epochs", 1, "--devices", 2, "--run-dir", "run")
    assert completed.code == 0, completed.output
    result = json.loads(Path("run/result.json").read_text())
    assert 0 < result["test"]["mean_iou"] < 1
    # A user's module has its own defaults, and not those of the template.
    assert result["config"]["model"]["init_args"]["weight_decay"] == 1e-4

    completed = command("test", "--ckpt", "run", "--devices", 1, "--run-dir", "tested")
    assert completed.code == 0, completed.output
    assert json.loads(Path("tested/result.json").read_text())["test"] == pytest.approx(result["test"], rel=1e-5)


def test_segmentation_reads_pascal_voc(tmp_path: Path) -> None:
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    shapes = Shapes(6, 40, seed=0)
    for index in range(len(shapes)):
        image, mask = shapes[index]
        image.save(folder / "JPEGImages" / f"{index}.jpg", quality=100)
        mask.convert("P").save(folder / "SegmentationClass" / f"{index}.png")
    for split, names in (("train", "0\n1\n2\n3\n"), ("val", "4\n5\n")):
        (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(names)
    data = SegmentationData(str(tmp_path), batch_size=2, val_size=1, size=40, seed=0)
    data.setup("fit")
    assert (len(data.train), len(data.val), len(data.test)) == (3, 1, 2)
    images, classes = next(iter(data.test_dataloader()))
    assert images.shape == (2, 3, 40, 40)
    for row, index in enumerate((4, 5)):
        assert np.array_equal(classes[row], np.asarray(shapes[index][1]))

    with pytest.raises(InputError, match=r"data\.root"):
        SegmentationData(str(tmp_path / "elsewhere")).setup("fit")


# --- a trained run


def test_export_gives_files_with_the_same_logits(tmp_path: Path) -> None:
    module = LitClassifier(seed=1)
    trainer = Trainer(accelerator="cpu", max_steps=0, logger=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "best.ckpt")
    # The example compares the logits itself.
    export.main(tmp_path / "best.ckpt", tmp_path / "exported")
    images = torch.rand(5, 1, 28, 28)
    exported = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    torch.testing.assert_close(exported(images), module.eval()(images))


# --- the commands, as users type them


@pytest.mark.nightly
def test_torchrun_restarts_a_training_that_ends_with_the_same_weights() -> None:
    words = torchrun("--nproc-per-node", 2, "--max-restarts", 3, ROOT / "examples" / "elastic.py")
    output = run(*words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "restart 1: continues after step 20" in output
    assert "bit-identical weights" in output
    assert not list(Path.cwd().glob("elastic-*"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("collectives", []), ("gather_predictions", ["p.pt"]), ("checkpoints", ["c.pt"])],
)
def test_torchrun_runs_the_example(name: str, arguments: list[str]) -> None:
    assert run(*torchrun("--nproc-per-node", 2, ROOT / "examples" / f"{name}.py", *arguments))


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(3))
def test_visual_studio_code_starts_the_command(index: int) -> None:
    launch = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"][index]
    program = ["-m", launch["module"]] if "module" in launch else [launch["program"]]
    words = [word.replace("${workspaceFolder}", str(ROOT)) for word in program + launch["args"]]
    # debugpy waits for an editor only if it is told to.
    assert run(sys.executable, "-m", "debugpy", "--listen", "127.0.0.1:0", *words, "--run-dir", "run")
    assert json.loads(Path("run/result.json").read_text())["steps"] == 50


@pytest.mark.nightly
def test_a_killed_segmentation_resumes_with_the_same_weights(
    train: Callable[..., Any], start_command: Callable[..., Any], tmp_path: Path
) -> None:
    # Four steps make an epoch: the first checkpoint is in its middle.
    save = ("--trainer.callbacks+=lit_mnist.plugins.ExactCheckpoint", "--trainer.callbacks.every_n_train_steps=3")
    words = ("--config", SHAPES, *SMALL, *save, "--epochs", 4, "--devices", 2)
    expected = train(*words)
    started = start_command(*words, "--run-dir", tmp_path / "killed")
    started.wait_for((tmp_path / "killed" / "checkpoints" / "last.ckpt").exists)
    started.kill()
    resumed = train("--resume", tmp_path / "killed", run_dir=tmp_path / "killed")
    assert resumed["weights_sha256"] == expected["weights_sha256"]


# What each notebook prints, also in the outputs that are stored in it.
NOTEBOOKS = {
    "ddp_in_a_notebook": ["test images on 2 ranks", "tensors are back in the kernel"],
    "look_at_a_run": ["120 steps on 2 ranks", "of 10000 images", "images are misclassified here"],
    "resume": ["exit code -9, resumed after step 60", "they differ by up to", "bit-identical"],
}


def printed(notebook: Any) -> str:
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs(name: str) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("accelerate")
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    stored = printed(notebook)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": Path.cwd()}}).execute()
    for expected in NOTEBOOKS[name]:
        assert expected in stored
        assert expected in printed(notebook)
