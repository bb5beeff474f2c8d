"""Examined code sees what it writes, and what existed before stays as it is: path, content, times, mode and inode."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV, descendants, snapshot, wait_for_end
from writing_programs import prepare

from ddp_doctor import remote
from ddp_doctor.errors import InputError
from ddp_doctor.files import folder_copy, private_view
from ddp_doctor.files.protection import Protection, examination_folder
from ddp_doctor.records.spec import Spec, Target

HERE = Path(__file__).parent
FORBIDDEN = (sys.executable, str(HERE / "without_namespaces.py"))
# How a machine may be, which protection is used there, and which ways of writing it denies.
MACHINES = {
    "as it is": ((), "", "none"),
    "without CAP_SYS_ADMIN": (
        ("setpriv", "--bounding-set", "-sys_admin") if os.geteuid() == 0 else (),
        "private view",
        "none",
    ),
    "without namespaces": (FORBIDDEN, "copy", "linked outside"),
}
ENDS = [("as it is", ""), ("as it is", "the doctor")]
SLOW_ENDS = [
    ("without CAP_SYS_ADMIN", ""),
    ("without namespaces", ""),
    ("without namespaces", "the doctor"),
    ("as it is", "a rank"),
    ("as it is", "Ctrl-C"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("machine", "killed"), [*ENDS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_ENDS)]
)
def test_the_code_sees_what_it_writes_and_nobody_else_does(machine: str, killed: str, tmp_path: Path) -> None:
    wrapper, protection, denied = MACHINES[machine]
    work, outside, temporary, report = (tmp_path / name for name in ("work", "outside", "temporary", "report.json"))
    prepare(work, outside)
    temporary.mkdir()
    before = snapshot(work), snapshot(outside)
    target = f"{HERE / 'writing_programs.py'}:write_and_train"
    words = [*wrapper, sys.executable, "-m", "ddp_doctor", "--only", "structural", "--timeout", "30"]
    doctor = subprocess.Popen(
        [*words, "--json", str(report), target, "--args", denied],
        cwd=work,
        env={**CHILD_ENV, "TMPDIR": str(temporary), "WAIT": "1000" if killed else "0"},
    )
    processes: list[int] = []
    try:
        while killed and not processes:
            assert doctor.poll() is None
            time.sleep(0.1)
            if any(temporary.rglob("fresh.bin")):
                processes = descendants(doctor.pid)
                number = signal.SIGINT if killed == "Ctrl-C" else signal.SIGKILL
                os.kill(processes[-1] if killed == "a rank" else doctor.pid, number)
        doctor.wait()
    finally:
        doctor.kill()
        doctor.wait()
    wait_for_end(processes)
    assert (snapshot(work), snapshot(outside)) == before
    if not killed:
        assert doctor.returncode == 0
        assert protection in {"", json.loads(report.read_text())["files"]["protection"]}
    # The folder of one that was killed is left to the system.
    assert len(list(temporary.iterdir())) == (killed == "the doctor")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ranks_of_a_command_end_with_a_doctor_that_is_killed(tmp_path: Path) -> None:
    # torchrun gives its ranks sessions of their own.
    program = """import pathlib, time, torch
torch.distributed.init_process_group("gloo")
pathlib.Path(f"ready{torch.distributed.get_rank()}").touch()
time.sleep(1000)
"""
    (tmp_path / "train.py").write_text(program)
    words = ["-m", "ddp_doctor", "--", "torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**CHILD_ENV, "TMPDIR": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    doctor = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment)
    try:
        while len(list(tmp_path.rglob("ready*"))) < 2:
            assert doctor.poll() is None
            time.sleep(0.1)
        processes = descendants(doctor.pid)
    finally:
        doctor.kill()
        doctor.wait()
    assert len(processes) > 3
    wait_for_end(processes)


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
