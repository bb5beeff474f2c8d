"""What people see: help, suggestions, completion, and the screens of commands in terminals of three widths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import CHILD_ENV, Program
from faults.conftest import SMALL, wait_for_exit
from faults.terminal import in_terminal

from lit_mnist.cli.flags import options_of
from lit_mnist.cli.main import COMMANDS, main
from lit_mnist.distributed.screen import fitted
from lit_mnist.distributed.signals import STOPPING
from lit_mnist.errors import nearest
from lit_mnist.run.help_text import brief, first_sentence
from lit_mnist.run.progress import ProgressDisplay, describe_time, with_bar

WIDTHS = (60, 100, 200)
HELPS = [["--help"], *([name, "--help"] for name in COMMANDS if name != "train"), ["doctor", "watch", "--help"]]


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Keeps the handlers that a command installs from the tests that follow in this process."""
    before = {signum: signal.getsignal(signum) for signum in STOPPING}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def printed(capsys: pytest.CaptureFixture[str], *words: str, engine: str = "lightning") -> str:
    assert main(list(words), engine=engine) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_fits_on_a_screen(
    words: list[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys, *words).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("usage: ")
    assert columns < 100 or len(lines) <= 40


def test_the_help_of_another_engine_fits_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert len(printed(capsys, "--help", engine="raw_ddp").splitlines()) <= 40


@pytest.mark.parametrize("command", ["", "fit", "test", "compare"])
def test_help_all_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *filter(None, [command]), "--help", "all")
    assert all(f"--{key}" in text for key in options_of(command or "train", "lightning"))
    assert ("--trainer.callbacks" in text) == (command != "compare")


def test_help_all_of_the_doctor_names_what_the_short_help_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = printed(capsys, "doctor", "--help"), printed(capsys, "doctor", "--help", "all")
    assert "--help all" in short.replace("[all]", "all")
    for flag in ("--samples", "--timeout", "--gpu-as-cpu", "--keep-output"):
        assert flag in whole
        assert flag not in short


@pytest.mark.parametrize(
    ("engine", "words", "meant"),
    [
        ("lightning", ("--devces", "2"), "did you mean --devices?"),
        ("raw_ddp", ("--devces", "2"), "did you mean --devices?"),
        ("lightning", ("--verison",), "did you mean --version?"),
        ("lightning", ("fit", "--hlep"), "did you mean --help?"),
        ("lightning", ("fit", "--help", "al"), "did you mean all?"),
        ("lightning", ("help",), "did you mean --help?"),
        ("lightning", ("trian",), "did you mean train?"),
        ("lightning", ("compare", "--engine", "all"), "did you mean --engines?"),
        ("lightning", ("export", "--ckp", "x"), "did you mean --ckpt?"),
        ("lightning", ("export", "--ckpt", "x", "--to", "onxx"), "did you mean onnx?"),
        ("lightning", ("new", "--hlep"), "did you mean --help?"),
        ("lightning", ("doctor", "--devces", "2"), "did you mean --devices?"),
        ("lightning", ("doctor", "wacth", "--", "x"), "did you mean watch?"),
        ("lightning", ("doctor", "watch", "--evry", "2", "--", "x"), "did you mean --every?"),
    ],
)
def test_an_unknown_word_suggests_the_nearest(
    engine: str, words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words), engine=engine) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("lit-mnist e", ["export"]),
        ("lit-mnist --dev", ["--devices"]),
        ("lit-mnist fit --model.ne", ["--model.net", "--model.nesterov"]),
        ("lit-mnist --precision bf", ["bf16-mixed"]),
        ("lit-mnist --precision=bf", ["bf16-mixed"]),
        ("lit-mnist test --ck", ["--ckpt"]),
        ("lit-mnist compare --engines with_a", ["with_accelerate"]),
        ("lit-mnist export --to o", ["onnx"]),
        ("lit-mnist doctor --exp", ["--explain"]),
        # The shell completes the names of files.
        ("lit-mnist --config ", []),
        ("ddp-doctor w", ["watch"]),
        ("ddp-doctor --explain LD034", ["LD034"]),
        ("ddp-doctor watch --ev", ["--every"]),
        ("ddp-doctor -- torchrun --d", []),
    ],
)
def test_the_shell_completes_without_torch(line: str, proposed: list[str]) -> None:
    module = "ddp_doctor.command" if line.startswith("ddp") else "lit_mnist.cli.main"
    script = (
        f"import sys; from {module} import main; code = main(['--complete', 'name', 'word', 'word before']);"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**CHILD_ENV, "COMP_LINE": line, "COMP_POINT": str(len(line))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == proposed


def on_screen(work: Callable[[], int], folder: Path, columns: int, **environment: str) -> tuple[str, list[str]]:
    """Returns the output of a program in a terminal, and the lines that it shows."""

    def seated() -> int:
        os.environ.update(environment)
        os.chdir(folder)
        return work()

    with in_terminal(seated, folder, columns) as terminal:
        assert wait_for_exit(terminal.group, Program(folder), 120)[0] == 0, terminal.output
    return terminal.output, terminal.screen()


def training() -> int:
    words = [*SMALL, "--max-steps", 12, "--devices", 2, "--run-dir", "run"]
    return main([str(word) for word in words])


def lengths(output: str) -> int:
    """Returns the length of the longest line that ends with a line feed, without what a bar has drawn before it.

    A line of one word, such as a path, cannot be shorter.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in output.split("\n")]
    return max((len(line) for line in lines if len(line.split()) > 1), default=0)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"CI": "true"}], ids=" ".join)
@pytest.mark.parametrize(
    "columns", [pytest.param(width, marks=() if width != 200 else pytest.mark.slow) for width in WIDTHS]
)
def test_the_screen_of_a_training_has_no_long_line_and_no_escape_codes(
    columns: int, environment: dict[str, str], tmp_path: Path
) -> None:
    output, lines = on_screen(training, tmp_path, columns, **environment)
    assert "\x1b" not in output
    assert lengths(output) <= columns
    known = ["running", "epoch", "trained", "tested", "results", "test"]
    assert [line.split()[0] for line in lines if line and line.split()[0] in known] == known, lines
    assert ("\u2501" in output) == ("NO_COLOR" in environment)


def test_a_terminal_shows_a_bar_with_the_time_left(tmp_path: Path) -> None:
    output, _ = on_screen(training, tmp_path, 100)
    assert "\x1b[" in output
    assert "\u2501" in output
    assert "12/12" in output
    assert "00:00" in output


def test_a_pipe_gets_whole_lines_without_escape_codes(program: Program) -> None:
    done = program(*SMALL, "--max-steps", 3, "--run-dir", "run")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert any(line.startswith("running   train: convnet on mnist") for line in done.out.splitlines())


@pytest.mark.parametrize(
    "columns", [pytest.param(width, marks=() if width == 60 else pytest.mark.slow) for width in WIDTHS]
)
def test_the_screens_of_evaluations_name_the_next_command(program: Program, columns: int) -> None:
    program.train(*SMALL, "--max-steps", 3)
    following = {"validate": "test", "test": "predict", "predict": "export"}
    for command, label in following.items():
        words = [command, "--ckpt", "run-1"]
        output, lines = on_screen(lambda words=words: main(words), program.folder, columns, NO_COLOR="1")
        shown = [line for line in lines if line]
        assert lengths(output) <= columns, lines
        assert any(line.split()[0] == "results" for line in shown)
        # A long command is continued after a backslash.
        assert any(line.startswith(f"{label} ") for line in shown), lines
        assert f" {label} --ckpt run-1" in " ".join(output.replace("\\", "").split()), lines


@pytest.mark.parametrize("engine", ["single", "raw_ddp"])
def test_an_evaluation_of_another_engine_shows_a_bar(engine: str, tmp_path: Path) -> None:
    batches = ("--data.eval_batch_size", 25)

    def work() -> int:
        words = [*SMALL, *batches, "--max-steps", 3, "--run-dir", "run"]
        return main([str(word) for word in words], engine=engine)

    output, lines = on_screen(work, tmp_path, 100)
    # The test after the training has one; the validation within the training has that of the training.
    assert "batch 4/4" in output
    assert output.index("3/3") < output.index("batch 4/4")
    assert not any(line.startswith("batch") for line in lines), lines

    output, lines = on_screen(lambda: main(["validate", "--ckpt", "run"], engine=engine), tmp_path, 100)
    assert "batch 4/4" in output
    assert not any(line.startswith("batch") for line in lines), lines


def test_a_pipe_gets_no_line_of_a_short_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(with_bar(range(3), 3)) == [0, 1, 2]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", WIDTHS)
def test_an_error_ends_its_lines_at_words(tmp_path: Path, columns: int) -> None:
    def work() -> int:
        return int(main(["--trainer.callbacks", "os.system"]) != 2)

    output, _ = on_screen(work, tmp_path, columns)
    assert lengths(output) <= columns
    assert output.startswith("error: ")


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_the_bar_without_escape_codes_can_be_removed(name: str, tmp_path: Path) -> None:
    def work() -> int:
        display = ProgressDisplay(100)
        for step in range(1, 50):
            display.update(step, {"train_loss": 0.5})
        display.line("epoch 1")
        display.clear()
        print("Stopped.")
        return 0

    output, lines = on_screen(work, tmp_path, 60, **{name: "1"})
    assert "\x1b" not in output
    assert [line for line in lines if line] == ["epoch 1", "Stopped."]


def test_lines_say_how_much_time_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lit_mnist.run.progress.time.monotonic", lambda: now[0])
    display = ProgressDisplay(300, done=100)
    now[0] += 20
    display.update(150, {"train_loss": 0.25})
    assert capsys.readouterr().out == "step 150/300  loss 0.2500  1:00 left\n"
    assert [describe_time(seconds) for seconds in (7, 750, 3765)] == ["0:07", "12:30", "1:02:45"]


def test_a_command_that_is_divided_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    line = "continue  lit-mnist fit --resume runs/20261122-002954-convnet --epochs 2 --max-steps -1"
    shown = fitted(line)
    assert all(len(part) <= 60 for part in shown.split("\n"))
    assert [part.endswith("\\") for part in shown.split("\n")] == [True] * shown.count("\n") + [False]
    assert shown.replace("\\\n", "").split() == line.split()


def test_the_short_help_has_the_first_sentence() -> None:
    text = "Learning rate; the peak if the schedule is not `constant`. With 0.1, it is lower."
    assert first_sentence(text) == "learning rate; the peak if the schedule is not `constant`"
    assert brief(text) == "learning rate"
    assert brief("A fault to inject: `kill`.") == "a fault to inject"
    assert nearest("--devces", ["--devices", "--data.name"]) == "; did you mean --devices?"
