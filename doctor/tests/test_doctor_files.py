"""Examined code sees what it writes, and what existed before stays as it is: path, content, times, mode and inode."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV
from snapshots import descendants, snapshot, wait_for_end
from writing_programs import OUTSIDE, WAYS, prepare

from ddp_doctor import remote
from ddp_doctor.errors import InputError
from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.files.protection import Protection
from ddp_doctor.files.temporary import PREFIX, examination_folder, remove_stale
from ddp_doctor.files.view_process import ViewProcess
from ddp_doctor.processes import children_of
from ddp_doctor.records.spec import Spec, Target

HERE = Path(__file__).parent
PROGRAMS = HERE / "writing_programs.py"
FORBIDDEN = (sys.executable, str(HERE / "without_namespaces.py"))
# How a machine may be, and which protection is used there.
MACHINES = {
    "as it is": ((), ""),
    "without CAP_SYS_ADMIN": (("setpriv", "--bounding-set", "-sys_admin"), "private view"),
    "without namespaces": (FORBIDDEN, "copy"),
}
TRAIN = Spec(Target("a:b"))


def is_root() -> bool:
    return os.geteuid() == 0


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("machine", "kill"),
    [
        ("as it is", False),
        pytest.param("without namespaces", False, marks=pytest.mark.slow),
        *(pytest.param(machine, True, marks=pytest.mark.slow) for machine in MACHINES),
        pytest.param("without CAP_SYS_ADMIN", False, marks=pytest.mark.slow),
    ],
)
def test_every_way_of_writing_is_seen_by_the_code_and_by_nobody_else(tmp_path: Path, machine: str, kill: bool) -> None:
    wrapper, protection = MACHINES[machine]
    if wrapper[:1] == ("setpriv",) and not is_root():
        wrapper = ()
    command = [*wrapper, sys.executable, str(HERE / "guarded.py"), str(tmp_path), *(["--kill"] if kill else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=CHILD_ENV, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["way"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(WAYS)
    assert {row["protection"] for row in found.values()} <= {
        protection or row["protection"] for row in found.values()
    }, found
    assert not {way: row["changed"] for way, row in found.items() if row["changed"]}
    # The report says that these are denied.
    unseen = OUTSIDE if {row["protection"] for row in found.values()} == {"copy"} else set()
    if not kill:
        assert {way for way, row in found.items() if not row["saw"]} == unseen, done.stderr


def in_protection(protection: Protection, spec: Spec, work: Callable[[], None]) -> int:
    """Runs a function in a process as a rank runs, and returns its exit code."""
    request = protection.begin(spec, VIEWS.make)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ.update(request["environment"])
            if request.get("namespaces"):
                private_view.enter(request["namespaces"], str(Path.cwd()))
            else:
                folder_copy.enter(Path(request["copy"]), ())
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


VIEWS = ViewProcess()


@pytest.fixture(params=["private view", "copy"])
def protection(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Protection:
    examination, work = tmp_path / "examination", tmp_path / "work"
    examination.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    return Protection(examination, keep_output=True, kind=request.param if request.param == "copy" else "")


def test_each_run_begins_anew_except_for_one_that_resumes(protection: Protection) -> None:
    def save() -> None:
        assert not Path("last.ckpt").exists()
        Path("last.ckpt").write_text("saved")

    def resume() -> None:
        assert Path("last.ckpt").read_text() == "saved"

    for purpose, work in (("train", save), ("train", save), ("save", save), ("resume", resume), ("train", save)):
        assert in_protection(protection, Spec(Target("a:b"), purpose=purpose), work) == 0, purpose
    protection.end()
    assert not Path("last.ckpt").exists()


def test_output_is_kept_if_that_is_wanted(protection: Protection) -> None:
    mine = Path("mine.txt").absolute()
    mine.write_text("mine")
    Path("read.txt").write_text("mine")

    def write() -> None:
        Path("mine.txt").write_text("changed")
        Path("new").mkdir()
        Path("new/file").write_text("new")

    assert in_protection(protection, TRAIN, write) == 0
    protection.end()
    kept = Path(protection.files([]).kept)
    assert kept.parent == Path.cwd()
    assert mine.read_text() == "mine"
    found = {path.name: path for path in kept.rglob("*") if path.is_file()}
    assert found.keys() == {"file", "mine.txt"}
    assert found["file"].read_text() == "new"
    assert found["mine.txt"].read_text() == "changed"
    assert str(found["mine.txt"]).endswith(str(mine))


def test_a_copy_has_links_to_what_is_not_copied(tmp_path: Path) -> None:
    work, root = tmp_path / "work", tmp_path / "examination" / "copy" / "files"
    for folder in (work / ".git", work / "src", tmp_path / "data", root.parent):
        folder.mkdir(parents=True)
    (work / "src" / "model.py").write_text("mine")
    (tmp_path / "data" / "images").write_text("many")
    (work / "relative").symlink_to("../data")
    folder_copy.make(work, root, {tmp_path / "examination"})
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
    with pytest.raises(InputError, match="has 1,000 MB, of which 1,000 MB are in data"):
        Protection(tmp_path / "examination", kind="copy").begin(TRAIN, VIEWS.make)


@pytest.mark.timeout(100)
def test_nothing_is_run_where_files_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def main(rank, world_size):\n    open('new', 'w')\n")
    words = [*FORBIDDEN, "--no-landlock", sys.executable, "-m", "ddp_doctor", "program.py:main"]
    done = subprocess.run(words, cwd=tmp_path, env=CHILD_ENV, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr.count("Landlock")) == (2, 1), done.stderr
    assert not (tmp_path / "new").exists()


def test_the_folder_of_a_doctor_that_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """
import sys, tempfile, time
from pathlib import Path
from ddp_doctor.files.temporary import examination_folder
tempfile.tempdir = sys.argv[1]
with examination_folder() as folder:
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed").chmod(0)
    print(folder, flush=True)
    time.sleep(1000)
"""
    doctors = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=CHILD_ENV, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, alive = (Path(str(doctor.stdout and doctor.stdout.readline()).strip()) for doctor in doctors)
        doctors[0].kill()
        doctors[0].wait()
        # What others may have put beside it.
        precious = tmp_path / "precious"
        (precious / "lock").mkdir(parents=True)
        (tmp_path / f"{PREFIX}link").symlink_to(precious)
        (tmp_path / f"{PREFIX}shared").mkdir(mode=0o777)
        (tmp_path / f"{PREFIX}shared").chmod(0o777)
        (tmp_path / f"{PREFIX}shared" / "lock").touch()
        (killed / "link").symlink_to(precious)
        (tmp_path / f"{PREFIX}without-lock").mkdir(mode=0o700)
        remove_stale()
        assert not killed.exists()
        assert alive.exists()
        assert (precious / "lock").is_dir()
        assert (tmp_path / f"{PREFIX}shared" / "lock").exists()
        assert (tmp_path / f"{PREFIX}without-lock").exists()
        os.utime(tmp_path / f"{PREFIX}without-lock", (1, 1))
        with examination_folder() as own:
            assert own.is_dir()
            assert not (tmp_path / f"{PREFIX}without-lock").exists()
        assert not own.exists()
    finally:
        for doctor in doctors:
            doctor.kill()
            doctor.communicate()


def test_trackers_are_offline_unless_the_user_has_them_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    found = remote.offline_environment(tmp_path)
    assert "WANDB_MODE" not in found
    assert (found["COMET_MODE"], found["NEPTUNE_MODE"], found["CLEARML_OFFLINE_MODE"]) == ("offline", "offline", "1")
    assert found["MLFLOW_TRACKING_URI"] == (tmp_path / "mlflow").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    assert "MLFLOW_TRACKING_URI" not in remote.offline_environment(tmp_path)


def test_other_machines_are_named_and_uploads_are_refused() -> None:
    script = """
import json, socket
from ddp_doctor import remote
found = []
remote.watch(found.append)
for address in (("127.0.0.1", 9), ("203.0.113.7", 443)):
    with socket.socket() as one:
        one.settimeout(0.05)
        try:
            one.connect(address)
        except OSError:
            pass
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    try:
        one.connect(("203.0.113.8", 80))
    except OSError:
        pass
import huggingface_hub
try:
    huggingface_hub.HfApi().upload_file(path_or_fileobj=b"", path_in_repo="a", repo_id="b")
except RuntimeError as error:
    print(json.dumps({"found": found, "error": str(error)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=CHILD_ENV, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["found"] == ["203.0.113.7:443"]
    assert "push_to_hub" in told["error"]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", range(40))
def test_a_program_that_writes_changes_nothing_however_the_examination_ends(number: int, tmp_path: Path) -> None:
    """The protection, the kill and its time, and the ways of writing depend on the number."""
    chance = random.Random(number)
    kill = ("nothing", "the doctor", "a rank", "Ctrl-C")[number % 4]
    prepare(tmp_path)
    (tmp_path / "temporary").mkdir()
    folders = tmp_path / "work", tmp_path / "outside"
    before = [snapshot(folder) for folder in folders]
    words = [*(FORBIDDEN if number // 4 % 2 else ()), sys.executable, "-m", "ddp_doctor"]
    words += [f"{PROGRAMS}:train_and_write", "--only", "structural", "--timeout", "60", "--args", str(number)]
    environment = {
        **CHILD_ENV,
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": f"{CHILD_ENV['PYTHONPATH']}:{HERE}",
    }
    doctor = subprocess.Popen(words, cwd=tmp_path / "work", env=environment, stdout=subprocess.PIPE, text=True)
    processes: list[int] = []
    try:
        if kill != "nothing":
            while not list(tmp_path.glob("temporary/*/run*/spec.json")):
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
    assert [snapshot(folder) for folder in folders] == before, out
    if kill == "the doctor":
        subprocess.run(
            [sys.executable, "-c", "from ddp_doctor.files.temporary import remove_stale; remove_stale()"],
            env=environment, check=True, timeout=60,
        )  # fmt: skip
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("wrapper", [(), FORBIDDEN], ids=["private view", "copy"])
def test_a_command_is_protected(wrapper: tuple[str, ...], tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "temporary").mkdir()
    script = tmp_path / "work" / "train.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import writing_programs\n"
        "writing_programs.train_and_write(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), '1')\n"
    )
    before = snapshot(tmp_path / "work")
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or "torchrun"
    words = [*wrapper, sys.executable, "-m", "ddp_doctor", "--only", "structural"]
    words += ["--json", "../report.json", "--", torchrun, "--nproc-per-node", "2", "train.py"]
    environment = {**CHILD_ENV, "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        words, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=270, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["files"]["protection"]
    assert bool(report["files"]["not_covered"]) == bool(wrapper) or not is_root()
    assert snapshot(tmp_path / "work") == before
    assert not list((tmp_path / "temporary").iterdir())
