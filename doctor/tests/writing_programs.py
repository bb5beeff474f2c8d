"""Programs that write in many ways, over files that exist and beside them; each sees what it has written."""

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from torch import nn

# What these write outside of the working folder is denied to a copy of it.
OUTSIDE = {"links", "absolute paths"}


def prepare(folder: Path) -> None:
    """Writes the files that must stay as they are, some of them outside of the working folder."""
    work, outside = folder / "work", folder / "outside"
    (work / "old" / "deep").mkdir(parents=True)
    outside.mkdir()
    for name in ("model.pt", "model.ckpt", "mine.txt", "mine.log", "old/a", "old/deep/b"):
        (work / name).write_text(f"mine: {name}")
    (outside / "precious").write_text("a week of training")
    (work / "link").symlink_to(outside / "precious")
    os.link(outside / "precious", work / "hard")
    np.save(work / "array.npy", np.arange(6.0))
    with contextlib.closing(sqlite3.connect(work / "runs.db")) as base, base:
        base.execute("create table runs (name text)")
    for path in sorted(folder.rglob("*")):
        os.utime(path, ns=(10**18, 10**18 + len(path.name)), follow_symlinks=False)


def opened() -> None:
    with open("model.pt", "r+b") as file:
        file.write(b"MINE")
    assert Path("model.pt").read_text() == "MINE: model.pt"
    with open("fresh.bin", "xb") as file:
        file.write(b"new")
    with open("mine.log", "a") as file:
        file.write("+")
    assert open("mine.log").read() == "mine: mine.log+"
    assert "fresh.bin" in os.listdir()


def array_saved() -> None:
    array = np.load("array.npy", mmap_mode="r+")
    array[:] = 7
    array.flush()
    assert np.load("array.npy").tolist() == [7.0] * 6
    np.save("array.npy", np.zeros(2))
    assert np.load("array.npy").shape == (2,)


def replaced() -> None:
    Path("new.tmp").write_text("new")
    os.replace("new.tmp", "model.pt")
    assert Path("model.pt").read_text() == "new"
    os.rename("model.ckpt", "old/moved")
    assert Path("old/moved").read_text() == "mine: model.ckpt"
    assert not {"new.tmp", "model.ckpt"} & set(os.listdir())


def removed() -> None:
    os.remove("model.pt")
    Path("mine.txt").unlink()
    shutil.rmtree("old")
    assert not {"model.pt", "mine.txt", "old"} & set(os.listdir())
    os.makedirs("old")
    assert os.listdir("old") == []
    Path("mine.txt").write_text("again")
    assert Path("mine.txt").read_text() == "again"


def copied() -> None:
    shutil.copy("mine.txt", "model.pt")
    assert Path("model.pt").read_text() == "mine: mine.txt"
    shutil.copytree("old", "copy")
    shutil.move("copy", "old/copy")
    assert Path("old/copy/deep/b").exists()


def database() -> None:
    with contextlib.closing(sqlite3.connect("runs.db")) as base, base:
        base.execute("insert into runs values ('x')")
    with contextlib.closing(sqlite3.connect("runs.db")) as base:
        assert base.execute("select * from runs").fetchall() == [("x",)]


def other_processes() -> None:
    subprocess.run("cp mine.txt model.ckpt && rm -r old && echo x > model.pt", shell=True, check=True)
    assert Path("model.ckpt").read_text() == "mine: mine.txt"
    code = "import os; open('model.pt', 'w').write('child'); os.remove('mine.txt')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Path("model.pt").read_text() == "child"
    assert not {"old", "mine.txt"} & set(os.listdir())


def linked() -> None:
    Path("link").write_text("new")
    assert (Path("..") / "outside" / "precious").read_text() == "new"
    with open("hard", "r+") as file:
        file.write("new")
    os.link("mine.txt", "second")
    with open("second", "a") as file:
        file.write("+")
    assert Path("second").read_text() == "mine: mine.txt+"
    os.symlink("model.pt", "pointer")
    with open("pointer", "a") as file:
        file.write("+")
    assert Path("model.pt").read_text() == "mine: model.pt+"


def outside() -> None:
    path = Path("..").resolve() / "outside" / "precious"
    path.write_text("new")
    assert path.read_text() == "new"
    path.with_name("beside").write_text("new")
    assert {entry.name for entry in os.scandir(path.parent)} == {"precious", "beside"}


def changed() -> None:
    os.chmod("model.pt", 0o400)
    assert os.stat("model.pt").st_mode & 0o777 == 0o400
    os.utime("mine.txt", (1, 1))
    assert os.path.getmtime("mine.txt") == 1
    os.truncate("mine.log", 2)
    assert os.path.getsize("mine.log") == 2
    os.chmod("old", 0o500)


WAYS = {
    "open": opened,
    "np.memmap and np.save": array_saved,
    "os.replace and os.rename": replaced,
    "os.remove and shutil.rmtree": removed,
    "shutil.copy, copytree and move": copied,
    "sqlite3": database,
    "a shell and another Python": other_processes,
    "links": linked,
    "absolute paths": outside,
    "chmod, utime and truncate": changed,
}


def train_and_write(rank: int, world_size: int, seed: str) -> None:
    """Trains, and writes in three ways that the seed chooses, on rank 0 between the steps."""
    from odd_programs import train

    ways = random.Random(int(seed)).sample(sorted(WAYS), 3)

    def write(step: int) -> None:
        if rank == 0 and step < len(ways):
            with contextlib.suppress(AssertionError, OSError, subprocess.CalledProcessError):
                WAYS[ways[step]]()
            time.sleep(0.2)

    train(rank, world_size, nn.Linear(16, 4), write)
