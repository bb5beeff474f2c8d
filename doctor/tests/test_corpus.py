"""The corpus of public programs: its lines are complete, and a copy of a checkout gets its data."""

import re
import shlex
from pathlib import Path

import data_recipes
from corpus import load, prepare

from ddp_doctor.faults import describe


def test_the_lines_of_the_corpus_are_complete() -> None:
    programs = {program.name: program for program in load()}
    assert len(programs) == len(load()) >= 40
    for name, program in programs.items():
        assert re.fullmatch("[0-9a-f]{40}", program.commit), name
        assert shlex.split(program.command), name
        assert set(program.faults) == program.judgement.keys() <= describe().keys(), name
        assert program.needs or not program.data, name
        assert all(hasattr(data_recipes, recipe) for recipes in program.data.values() for recipe in recipes), name


def test_a_copy_of_a_checkout_gets_its_data(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "src").mkdir(parents=True)
    (checkout / "src" / "mnist-mixed.py").write_text("pass")
    program = next(program for program in load() if program.name == "yangkky-mnist-mixed")
    folder = prepare(program, checkout, tmp_path / "copy")
    assert (folder / "mnist-mixed.py").exists()
    assert (folder / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte").exists()
    assert not (checkout / "src" / "data").exists()
