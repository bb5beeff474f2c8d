"""Programs that write in many ways, over files that exist and beside them; each sees what it has written."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from torch import nn


def prepare(work: Path, outside: Path) -> None:
    """Writes the files that must stay as they are, some of them outside of the working folder."""
    for way in WAYS:
        own, precious = work / way.__name__, outside / way.__name__ / "precious"
        (own / "old" / "deep").mkdir(parents=True)
        precious.parent.mkdir(parents=True)
        for name in ("model.pt", "model.ckpt", "mine.txt", "mine.log", "old/a", "old/deep/b"):
            (own / name).write_text(f"mine: {name}")
        precious.write_text("a week of training")
        (own / "link").symlink_to(precious)
        os.link(precious, own / "hard")
        np.save(own / "array.npy", np.arange(6.0))
        with contextlib.closing(sqlite3.connect(own / "runs.db")) as base, base:
            base.execute("create table runs (name text)")
    for path in sorted([*work.rglob("*"), *outside.rglob("*")]):
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
    assert Path("link").resolve().read_text() == "new"
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
    path = Path("link").resolve()
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


WAYS = (opened, array_saved, replaced, removed, database, other_processes, linked, outside, changed)


def write_and_train(rank: int, world_size: int, denied: str) -> None:
    """Trains; rank 0 writes before in each way, and sees what it has written except in the ways that are denied."""
    from test_odd_programs import train

    begin = Path.cwd()
    for way in WAYS if rank == 0 else ():
        os.chdir(begin / way.__name__)
        try:
            way()
        except (AssertionError, OSError):
            if way.__name__ not in denied:
                raise
        else:
            assert way.__name__ not in denied
    os.chdir(begin)
    time.sleep(float(os.environ.get("WAIT", "0")))
    train(rank, world_size, nn.Linear(16, 4))
