"""The corpus of public programs: its lines, and the data that its recipes build. corpus.py examines the programs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from data_recipes import RECIPES
from public_programs import HERE, STAND_INS, load, prepare

from ddp_doctor.faults import describe

CHECKOUTS = os.environ.get("DOCTOR_CHECKOUTS", "")
_READ = """
import torchvision
from torchvision import datasets
mnist, cifar, folder = datasets.MNIST("mnist"), datasets.CIFAR10("cifar", train=False), datasets.ImageFolder("images")
print(len(mnist), len(cifar), len(folder), datasets.CIFAR100("cifar100")[0][0].size)
"""


def test_the_lines_of_the_corpus_are_complete():
    programs = load()
    assert len(programs) >= 40
    assert len({program.name for program in programs}) == len(programs)
    for program in programs:
        assert re.fullmatch("[0-9a-f]{40}", program.commit), program.name
        assert shlex.split(program.command), program.name
        assert set(program.faults) <= describe().keys(), program.name
        assert set(program.faults) == program.judgement.keys(), program.name
        assert program.needs or not program.data, program.name
        assert {recipe for recipes in program.data.values() for recipe in recipes} <= RECIPES.keys(), program.name


def test_each_commit_belongs_to_a_program():
    commits = yaml.safe_load((HERE / "programs.yaml").read_text())["commits"]
    assert commits.keys() == {program.repository for program in load()}


def test_a_copy_of_a_checkout_gets_its_data(tmp_path: Path):
    checkout = tmp_path / "checkout"
    (checkout / "src").mkdir(parents=True)
    (checkout / "src" / "mnist-mixed.py").write_text("pass")
    program = next(program for program in load() if program.name == "yangkky-mnist-mixed")
    folder = prepare(program, checkout, tmp_path / "copy")
    assert (folder / "mnist-mixed.py").exists()
    assert (folder / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte").exists()
    assert not (checkout / "src" / "data").exists()


@pytest.mark.slow
def test_torchvision_reads_the_data(tmp_path: Path):
    RECIPES["mnist"](tmp_path / "mnist", train=32, test=16)
    RECIPES["cifar"](tmp_path / "cifar", test=16)
    RECIPES["cifar"](tmp_path / "cifar100", classes=100)
    RECIPES["image_folder"](tmp_path / "images", splits=[""], each=2)
    environment = os.environ | {"PYTHONPATH": str(STAND_INS)}
    words = [sys.executable, "-c", _READ]
    read = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert read.stdout.split() == ["32", "16", "8", "(32,", "32)"], read.stderr


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(not CHECKOUTS, reason="DOCTOR_CHECKOUTS names no folder of checkouts")
def test_a_public_program_is_examined(tmp_path: Path):
    words = [sys.executable, HERE / "corpus.py", "pytorch-ddp-series-torchrun", "--checkouts", CHECKOUTS]
    words = [*map(str, words), "--work", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=950)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit 0" in done.stdout
