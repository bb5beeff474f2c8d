"""`lit-mnist new`: the project that it writes runs at once, and a rejected command writes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path, PurePath

import pytest
import yaml
from conftest import Program, as_nobody, result_of
from processes import ROOT, Done, assert_rejected, wait_for

from lit_mnist.cli.new import PLACEHOLDER, TEMPLATE, contents_of, help_of_new, run_new
from lit_mnist.errors import InputError

FILES = {
    ".github/workflows/ranks.yml",
    "README.md",
    "config.yaml",
    "tests/test_doctor.py",
    "tests/test_ranks.py",
    "train.py",
    "rings/__init__.py",
    "rings/data.py",
    "rings/module.py",
}
RINGS = ("--config", "config.yaml", "--import", "rings")


@pytest.fixture
def project(program: Program) -> Program:
    """The command in the folder of a new project with the name rings."""
    done = program("new", "rings")
    assert done.code == 0, done.err
    assert "lit-mnist --config config.yaml --import rings --devices 2" in done.out
    program.folder /= "rings"
    return program


def python(folder: Path, *words: str, timeout: int = 850) -> Done:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_the_project_is_complete_and_of_the_user_s_own(project: Program) -> None:
    written = {str(path.relative_to(project.folder)) for path in project.folder.rglob("*") if path.is_file()}
    assert written == FILES
    texts = {name: (project.folder / name).read_text() for name in FILES}
    for name, text in texts.items():
        assert PLACEHOLDER not in text
        # The installed package is named; the experiment is not.
        assert "mnist" not in re.sub(r"lit[_-]mnist|LIT_MNIST", "", text.lower()), name
    assert "lit_mnist" not in texts["rings/module.py"]
    assert len(texts["rings/module.py"].splitlines()) <= 65
    assert yaml.safe_load(texts["config.yaml"])["model"]["class_path"] == "rings.LitModel"


def test_a_forgotten_cd_is_named(project: Program) -> None:
    project.folder = project.folder.parent
    assert_rejected(project(*RINGS), "There is rings/config.yaml", "`cd rings`")


def test_the_readme_s_commands_exist(project: Program) -> None:
    """Each command of the README is one that the tests below run."""
    text = (project.folder / "README.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert commands == [
        "lit-mnist --config config.yaml --import rings --devices 2 --run-dir runs/first",
        "lit-mnist fit --resume runs/first --import rings --devices 2",
        "lit-mnist test --ckpt runs/first --import rings --devices 1",
        "python -m pytest",
        "ddp-doctor --timeout 300 -- torchrun --nproc-per-node 2 train.py --folder runs/doctor",
    ]


def test_the_project_trains_on_two_ranks_and_tests_on_any_number(project: Program) -> None:
    """The short variant; the test below runs the README's commands as they are."""
    folder = project.train(*RINGS, "--devices", 2, "--epochs", 2)
    expected = result_of(folder)["test"]
    assert expected["test_accuracy"] > 0.5
    for devices in (1, 3):
        done = project("test", "--ckpt", folder, "--import", "rings", "--devices", devices, "--run-dir", str(devices))
        assert done.code == 0, done.err
        result = result_of(project.folder / str(devices))
        assert (result["world_size"], result["exact"]) == (devices, True)
        assert result["test"]["test_accuracy"] == expected["test_accuracy"]
        assert result["test"]["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_readme_s_commands_run_as_a_new_user_runs_them(project: Program) -> None:
    train = ("-m", "lit_mnist.cli.main", *RINGS, "--devices", "2", "--run-dir")
    assert python(project.folder, *train, "runs/whole").code == 0
    with project.started(*RINGS, "--devices", 2, "--run-dir", "runs/first", "--epochs", 10) as group:
        wait_for((project.folder / "runs/first/checkpoints/last.ckpt").exists, 120)
        os.killpg(group, signal.SIGKILL)
    assert not (project.folder / "runs/first/result.json").exists()
    words = ("-m", "lit_mnist.cli.main", "fit", "--resume", "runs/first", "--import", "rings", "--devices", "2")
    done = python(project.folder, *words)
    assert done.code == 0, done.err
    whole, resumed = (result_of(project.folder / "runs" / name) for name in ("whole", "first"))
    assert resumed["weights_sha256"] == whole["weights_sha256"]

    found = []
    for devices in "123":
        words = ("test", "--ckpt", "runs/first", "--import", "rings", "--devices", devices, "--run-dir", f"t{devices}")
        assert python(project.folder, "-m", "lit_mnist.cli.main", *words).code == 0
        found.append(json.loads((project.folder / f"t{devices}" / "result.json").read_text())["test"])
    assert len({metrics["test_accuracy"] for metrics in found}) == 1
    assert len({round(metrics["test_loss"], 5) for metrics in found}) == 1

    done = python(project.folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.code == 0, done.out
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--folder", "runs/doctor")
    doctor = ("-m", "lit_mnist.cli.main", "doctor", "--timeout", "300", "--", sys.executable)
    done = python(project.folder, *doctor, *torchrun, timeout=900)
    assert done.code == 0, done.out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_another_model_and_other_data_take_their_place(project: Program) -> None:
    """What the README's last section says, with a regression on sequences."""
    (project.folder / "rings" / "module.py").write_text(
        """
import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanSquaredError


class LitModel(LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.recurrent, self.head = torch.nn.GRU(1, width, batch_first=True), torch.nn.Linear(width, 1)
        self.error = MeanSquaredError()

    def forward(self, series):
        return self.head(self.recurrent(series)[0][:, -1])

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch["series"]), batch["next"])

    def validation_step(self, batch, batch_idx):
        self.error.update(self(batch["series"]), batch["next"])
        self.log("val_error", self.error)

    def test_step(self, batch, batch_idx):
        self.error.update(self(batch["series"]), batch["next"])
        self.log("test_error", self.error)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
"""
    )
    path = project.folder / "rings" / "data.py"
    text = path.read_text()
    text = text.replace("make_points(", "Sines(").partition("def Sines(")[0] + (
        """class Sines(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        self.starts = torch.rand(count, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = torch.sin(6 * self.starts[index] + torch.arange(9) / 2)
        return {"series": values[:8, None], "next": values[8:]}
"""
    )
    path.write_text(text)
    config = yaml.safe_load((project.folder / "config.yaml").read_text())
    config["model"]["init_args"] = {"width": 4}
    (project.folder / "config.yaml").write_text(yaml.safe_dump(config))
    folder = project.train(*RINGS, "--devices", 2, "--epochs", 2)
    assert result_of(folder)["exact"]
    done = python(project.folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.code == 0, done.out


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (
            "my-rings",
            "use letters, digits and underscores, first a letter, such as my_",
        ),
        ("3d", "'3d' is not the name of a Python package"),
        ("class", "'class' is not the name of a Python package: it is a keyword"),
        ("tests", "The name tests is used by another part of the project"),
        ("json", "There is a Python module json already"),
        ("here/torch", "There is a Python module torch already"),
        ("full", "full exists and is not empty: choose another name, or move it away"),
        ("file", "file is a file"),
        ("file/rings", "cannot be"),
        ("nothing", "nothing is a link to nothing"),
    ],
)
def test_a_bad_name_or_place_is_rejected(program: Program, folder: str, message: str) -> None:
    (program.folder / "full").mkdir()
    (program.folder / "full" / "mine.py").touch()
    (program.folder / "file").touch()
    (program.folder / "nothing").symlink_to("absent")
    assert_rejected(program("new", folder), message)


def test_wrong_words_are_rejected(program: Program) -> None:
    assert_rejected(program("new"), "needs one folder, such as: lit-mnist new my_project")
    assert_rejected(program("new", "one", "two"), "needs one folder")
    assert_rejected(program("new", "--name", "rings"), "Unknown flag --name")
    assert_rejected(program("new", "rings", engine="raw_ddp"), "Only train.py has the command new")


def test_a_place_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    with as_nobody(), pytest.raises(InputError, match=r"rings cannot be .*: Permission denied"):
        run_new([str(tmp_path / "rings")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [True, False])
def test_a_disk_that_becomes_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    folder = tmp_path / "deep" / "rings"
    if exists:
        folder.mkdir(parents=True)
    write, count = Path.write_text, []

    def write_text(path: Path, text: str) -> int:
        count.append(path)
        if len(count) == 5:
            raise OSError(28, "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(InputError, match=r"rings cannot be written: No space left on device"):
        run_new([str(folder)])
    assert len(count) == 5
    assert list(tmp_path.rglob("*")) == ([folder.parent, folder] if exists else [])


def test_an_empty_folder_and_the_current_one_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rings").mkdir()
    monkeypatch.chdir(tmp_path / "rings")
    assert run_new(["."]) == 0
    assert (tmp_path / "rings" / "rings" / "module.py").is_file()
    assert "  cd " not in capsys.readouterr().out


def test_every_file_of_the_template_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["lit_mnist"]
    names = {f"template/{path}" for path in contents_of(PLACEHOLDER)}
    assert {name.replace("rings", PLACEHOLDER) for name in FILES} == {name.removeprefix("template/") for name in names}
    for name in names:
        assert any(PurePath(name).match(pattern) for pattern in patterns), name


def test_the_help_names_the_command() -> None:
    assert help_of_new(["--help"], "lit-mnist").startswith("usage: lit-mnist new FOLDER")
    assert not help_of_new(["rings"], "lit-mnist")


def test_what_a_run_has_left_in_the_template_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template runs where it is, too."""
    template = tmp_path / "template"
    shutil.copytree(TEMPLATE, template)
    for name in ("my_project/__pycache__/module.pyc", "runs/script/last.ckpt"):
        (template / name).parent.mkdir(parents=True, exist_ok=True)
        (template / name).write_bytes(b"\x80\xff")
    monkeypatch.setattr("lit_mnist.cli.new.TEMPLATE", template)
    run_new([str(tmp_path / "rings")])
    assert {str(path.relative_to(tmp_path / "rings")) for path in (tmp_path / "rings").rglob("*.*")} >= {"train.py"}
    assert not (tmp_path / "rings" / "runs").exists()
    assert not list((tmp_path / "rings").rglob("__pycache__"))
