"""Examined code sees what it writes, and what existed before stays as it is: path, content, times, mode and inode."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV
from guarded import exit_code, start
from snapshots import descendants, snapshot, wait_for_end
from writing_programs import OUTSIDE, WAYS, prepare

from ddp_doctor import remote
from ddp_doctor.errors import InputError
from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.files.protection import Protection, examination_folder
from ddp_doctor.processes import children_of
from ddp_doctor.records.spec import Spec, Target

HERE = Path(__file__).parent
FORBIDDEN = (sys.executable, str(HERE / "without_namespaces.py"))
# How a machine may be, and which protection is used there.
MACHINES = {
    "as it is": ((), ""),
    "without CAP_SYS_ADMIN": (("setpriv", "--bounding-set", "-sys_admin") if os.geteuid() == 0 else (), "private view"),
    "without namespaces": (FORBIDDEN, "copy"),
}


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "machine", ["as it is", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MACHINES][1:])]
)
def test_every_way_of_writing_is_seen_by_the_code_and_by_nobody_else(tmp_path: Path, machine: str) -> None:
    wrapper, protection = MACHINES[machine]
    command = [*wrapper, sys.executable, str(HERE / "guarded.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=CHILD_ENV, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["way"]: row for row in map(json.loads, done.stdout.splitlines())}
    kinds = {row["protection"] for row in found.values()}
    assert list(found) == list(WAYS)
    assert kinds == {protection or max(kinds)}, found
    assert not {way: row["changed"] for way, row in found.items() if row["changed"]}
    # The report says that these are denied.
    unseen = OUTSIDE if kinds == {"copy"} else set()
    assert {way for way, row in found.items() if not row["saw"]} == unseen, done.stderr


@pytest.mark.parametrize("kind", ["", "copy"])
def test_each_run_begins_anew_except_for_one_that_resumes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examination").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    protection = Protection(tmp_path / "examination", kind=kind)

    def save() -> None:
        assert not Path("last.ckpt").exists()
        Path("last.ckpt").write_text("saved")

    def resume() -> None:
        assert Path("last.ckpt").read_text() == "saved"

    for again, work in ((False, save), (False, save), (True, resume), (False, save)):
        spec = Spec(Target("a:b"), interventions={"started_again": True} if again else {})
        assert exit_code(start(protection, spec, work)) == 0, again
    protection.end()
    assert not Path("last.ckpt").exists()
    assert not list((tmp_path / "examination").iterdir())


def test_a_copy_has_links_to_what_is_not_copied(tmp_path: Path) -> None:
    work, root = tmp_path / "work", tmp_path / "examination" / "copy" / "files"
    for folder in (work / ".git", work / "src", tmp_path / "data", root.parent):
        folder.mkdir(parents=True)
    (work / "src" / "model.py").write_text("mine")
    (tmp_path / "data" / "images").write_text("many")
    (work / "relative").symlink_to("../data")
    folder_copy.make(work, root, tmp_path / "examination")
    copy = Path(f"{root}{work}")
    assert (copy / ".git").readlink() == work / ".git"
    assert (copy / "src" / "model.py").read_text() == "mine"
    assert not (copy / "src").is_symlink()
    assert (copy / "relative" / "images").read_text() == (copy.parent / "data" / "images").read_text() == "many"


def test_a_large_folder_is_rejected_where_it_would_be_copied(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with open("data/images", "wb") as file:
        file.truncate(2 * folder_copy.MOST_BYTES)
    (tmp_path / "examination").mkdir()
    with pytest.raises(InputError, match="more than 500 MB, such as "):
        Protection(tmp_path / "examination", kind="copy").begin(Spec(Target("a:b")), private_view.make)


@pytest.mark.timeout(100)
def test_nothing_is_run_where_files_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def main(rank, world_size):\n    open('new', 'w')\n")
    words = [*FORBIDDEN, "--no-landlock", sys.executable, "-m", "ddp_doctor", "program.py:main"]
    done = subprocess.run(words, cwd=tmp_path, env=CHILD_ENV, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr.count("Landlock")) == (2, 1), done.stderr
    assert not (tmp_path / "new").exists()


def test_the_folder_of_an_examination_is_removed_without_what_its_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir(mode=0o500)
    with examination_folder() as folder:
        (folder / "closed" / "in").mkdir(parents=True)
        (folder / "closed" / "in" / "link").symlink_to(tmp_path / "precious")
        (folder / "closed").chmod(0)
    assert not folder.exists()
    assert (tmp_path / "precious").stat().st_mode & 0o777 == 0o500


def test_trackers_are_offline_unless_the_user_has_them_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    found = remote.offline_environment(tmp_path)
    assert "WANDB_MODE" not in found
    assert (found["COMET_MODE"], found["CLEARML_OFFLINE_MODE"]) == ("offline", "1")
    assert found["MLFLOW_TRACKING_URI"] == (tmp_path / "mlflow").as_uri()


def test_other_machines_are_named_and_uploads_are_refused() -> None:
    script = """
import contextlib, json, socket
from ddp_doctor import remote
found = []
remote.watch(found.append)
for kind, address in ((socket.SOCK_STREAM, "127.0.0.1"), (socket.SOCK_STREAM, "203.0.113.7"), (2, "203.0.113.8")):
    with socket.socket(socket.AF_INET, kind) as one, contextlib.suppress(OSError):
        one.settimeout(0.05)
        one.connect((address, 443))
import huggingface_hub
try:
    huggingface_hub.HfApi().upload_file(path_or_fileobj=b"", path_in_repo="a", repo_id="b")
except RuntimeError as error:
    print(json.dumps([found, str(error)]))
"""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, env=CHILD_ENV, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found, error = json.loads(done.stdout)
    assert found == ["203.0.113.7:443"]
    assert "push_to_hub" in error


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(16))
def test_a_program_that_writes_changes_nothing_however_the_examination_ends(number: int, tmp_path: Path) -> None:
    """The protection, the start of the ranks, the kill and its time, and the ways of writing depend on the number."""
    chance = random.Random(number)
    kill = ("nothing", "the doctor", "a rank", "Ctrl-C")[number % 4]
    wrapper, by_command = FORBIDDEN if number // 4 % 2 else (), number // 8 % 2
    prepare(tmp_path)
    (tmp_path / "temporary").mkdir()
    ranks = "int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])"
    script = f"import os, writing_programs\nwriting_programs.train_and_write({ranks}, '{number}')\n"
    (tmp_path / "work" / "train.py").write_text(script)
    before = snapshot(tmp_path / "work"), snapshot(tmp_path / "outside")
    words = [*wrapper, sys.executable, "-m", "ddp_doctor", "--only", "structural", "--timeout", "60"]
    if by_command:
        words += ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    else:
        words += [f"{HERE / 'writing_programs.py'}:train_and_write", "--args", str(number)]
    path = f"{CHILD_ENV['PYTHONPATH']}:{HERE}"
    environment = {**CHILD_ENV, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": path}
    doctor = subprocess.Popen(words, cwd=tmp_path / "work", env=environment, stdout=subprocess.PIPE, text=True)
    processes: list[int] = []
    try:
        if kill != "nothing":
            while not list(tmp_path.glob("temporary/*/run*/spec")):
                assert doctor.poll() is None
                time.sleep(0.05)
            time.sleep(chance.uniform(0.0, 12.0))
            processes = descendants(doctor.pid)
            ranks = [rank for server in children_of(doctor.pid) for rank in children_of(server)]
            if kill == "the doctor":
                doctor.kill()
            elif kill == "Ctrl-C":
                doctor.send_signal(signal.SIGINT)
            elif ranks:
                os.kill(chance.choice(ranks), signal.SIGKILL)
        out = doctor.communicate()[0]
    finally:
        doctor.kill()
        doctor.wait()
    wait_for_end(processes)
    assert (snapshot(tmp_path / "work"), snapshot(tmp_path / "outside")) == before, out
    assert kill != "nothing" or doctor.returncode == 0, out
    assert kill == "the doctor" or not list((tmp_path / "temporary").iterdir())
