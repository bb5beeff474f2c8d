"""Bad input: exit code 2, one message that names the setting, no process, no traceback, nothing half-written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Program
from processes import assert_rejected

import lit_mnist
from lit_mnist.cli.request import parse
from lit_mnist.errors import InputError

FILES = Path(lit_mnist.__file__).parent / "data" / "digits" / "files"


def callback(name: str, settings: str = "") -> list[str]:
    return ["--trainer.callbacks", f"[{{class_path: lightning.pytorch.callbacks.{name}, init_args: {{{settings}}}}}]"]


COMMANDS = {
    "unknown flag": (["--epoch", "3"], ["--epoch", "did you mean --epochs?"]),
    "unknown long flag": (["--model.lrr", "3"], ["--model.lrr", "did you mean --model.lr?"]),
    "unknown trainer flag": (["--trainer.max_epoch", "3"], ["did you mean --trainer.max_epochs?"]),
    "flag of LightningCLI": (["fit", "--print_config"], ["--print_config", "config.yaml in its folder"]),
    "unknown command": (["fitt"], ["fitt", "did you mean fit?\n"]),
    "unknown command unlike any": (
        ["xyz"],
        ["use train, fit, validate, test, predict, compare, new, doctor, export.\n"],
    ),
    "stray word": (["fit", "now"], ["'now'"]),
    "flag without a value": (["--lr"], ["--lr needs a value"]),
    "wrong type": (["--epochs", "many"], ["trainer.max_epochs", "int", "many"]),
    "wrong float": (["--lr", "fast"], ["model.lr", "float", "fast"]),
    "wrong choice": (["--model.net", "resnet"], ["model.net", "convnet", "basicnet", "resnet"]),
    "wrong precision": (["--precision", "17"], ["trainer.precision", "16-mixed", "17"]),
    "null": (["--epochs", "null"], ["trainer.max_epochs"]),
    "batch size 0": (["--batch-size", "0"], ["data.batch_size", "0"]),
    "batch size of 3 ranks": (["--batch-size", "128", "--devices", "3"], ["128", "3 ranks", "126 or 129"]),
    "no devices": (["--devices", "0"], ["trainer.devices", "0"]),
    "empty devices": (["--devices", "[]"], ["trainer.devices", "empty"]),
    "more ranks than samples": (
        ["--devices", "7", "--batch-size", "7", "--data.test_size", "5"],
        ["test", "5", "7 ranks"],
    ),
    "contradiction": (["--epochs", "1", "--trainer.max_epochs", "2"], ["--epochs", "--trainer.max_epochs", "1", "2"]),
    "contradiction of an alias": (["--precision", "16", "--trainer.precision", "bf16"], ["--precision", "contradicts"]),
    "unknown packaged config": (["--config", "lit_mnist:gpux.yaml"], ["gpux.yaml", "gpu.yaml, seed.yaml"]),
    "contradiction the other way": (["--trainer.devices=2", "--devices", "1"], ["contradicts"]),
    "class of another package": (["--trainer.callbacks", "os.system"], ["trainer.callbacks", "os.system", "lightning"]),
    "option that breaks a promise": (
        ["--trainer.use_distributed_sampler", "false"],
        ["use_distributed_sampler", "function of the seed and the step"],
    ),
    "no checkpoints": (["--trainer.enable_checkpointing", "false"], ["enable_checkpointing", "resumed", "--keep"]),
    "another norm": (["--trainer.gradient_clip_algorithm", "value"], ["gradient_clip_val", "norm"]),
    "other plugins": (["--trainer.plugins", "x"], ["trainer.plugins", "--precision"]),
    "barebones": (["--trainer.barebones", "true"], ["barebones", "checkpoints"]),
    "a strategy": (["--trainer.strategy", "fsdp"], ["trainer.strategy", "ddp"]),
    "no batch left": (["--trainer.limit_train_batches", "0"], ["limit_train_batches", "859"]),
    "a share above one": (["--trainer.limit_val_batches", "1.5"], ["limit_val_batches", "share"]),
    "own folder for Lightning": (["--trainer.default_root_dir", "x"], ["default_root_dir", "--run-dir"]),
    "several machines": (["--trainer.num_nodes", "2"], ["num_nodes", "torchrun"]),
    "compiled on two ranks": (["--model.compile", "true", "--devices", "2"], ["model.compile", "--devices 1"]),
    "a graph on a processor": (
        ["--run.cuda_graph", "true", "--trainer.accelerator", "cpu"],
        ["run.cuda_graph", "one GPU", "cpu"],
    ),
    "a traced step without weights": (
        ["--run.trace", "times", "--run.trace_step", "5"],
        ["run.trace_step", "steps or traffic"],
    ),
    "three views": (["--model.views", "3"], ["model.views", "1", "5", "9"]),
    "missing config": (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    "random seed": (["--seed", "true"], ["seed_everything"]),
    "negative seed": (["--seed", "-1"], ["seed_everything", "-1"]),
    "negative learning rate": (["--lr", "-1"], ["model.lr", "-1"]),
    "infinite learning rate": (["--lr", ".inf"], ["model.lr", "inf"]),
    "nothing to train on": (["--data.val_size", "60000"], ["data.val_size", "60000"]),
    "too few for a batch": (["--data.train_size", "50"], ["50", "64"]),
    "missing folder of data": (["--data.root", "nowhere"], ["nowhere"]),
    "missing checkpoint": (["--resume", "nowhere"], ["nowhere"]),
    "test without a checkpoint": (["test"], ["--ckpt"]),
    "training with --ckpt": (["--ckpt", "x"], ["--ckpt", "--resume"]),
    "resume without a value": (["--resume", ""], ["--resume needs a value"]),
    "run folder without a value": (["--run-dir="], ["--run-dir needs a value"]),
    "resume for a test": (["test", "--ckpt", "x", "--resume", "y"], ["--resume", "--ckpt"]),
    "a list that is appended to": (["--trainer.devices+", "3"], ["--trainer.devices+"]),
    "an unknown callback": (["--trainer.callbacks", "NoSuchCallback"], ["trainer.callbacks: Unknown callback NoSuch"]),
    "a misspelled callback": (["--trainer.callbacks", "[{class_path: EarlyStoping}]"], ["did you mean EarlyStopping?"]),
    "a class that Lightning lacks": (callback("NoSuch"), ["trainer.callbacks: Unknown callback NoSuch"]),
    "an unknown logger": (["--trainer.logger", "CSVLoger"], ["Unknown logger CSVLoger; did you mean CSVLogger?"]),
    "an unknown mode": (
        callback("EarlyStopping", "monitor: val_loss, mode: sideways"),
        ["trainer.callbacks: `mode` can be min, max, got sideways.\n"],
    ),
    "a timer in words": (callback("Timer", "duration: soon"), ["trainer.callbacks: `Timer(", "DD:HH:MM:SS.\n"]),
    "an unknown interval": (
        callback("LearningRateMonitor", "logging_interval: never"),
        ["LearningRateMonitor cannot be made: logging_interval must be step or epoch or null, but is never.\n"],
    ),
    "a word for steps": (["--trainer.min_steps", "x"], ["trainer.min_steps must be int or null, but is x.\n"]),
    "a key that resembles none": (
        ["--trainer", "{max_epochs: 1, foo: 2}"],
        ["Unknown key trainer.foo in --trainer.\n"],
    ),
    "no learning rate": (["--lr", "nan"], ["model.lr must be a finite number, but is nan"]),
    "no section": (["--model", "null"], ["model must be a section of settings, but is null"]),
    "a section that is not YAML": (["--model", "{lr: 0.1, lr"], ["--model is not YAML", "in line 2, column"]),
    "own checkpoints": (["--trainer.callbacks", "ModelCheckpoint"], ["ModelCheckpoint", "checkpoints"]),
    "accumulation that changes": (
        callback("GradientAccumulationScheduler", "scheduling: {1: 4}"),
        ["GradientAccumulationScheduler", "--trainer.accumulate_grad_batches"],
    ),
    "weight averaging": (callback("WeightAveraging"), ["WeightAveraging", "best.ckpt"]),
    "a moving average of weights": (callback("EMAWeightAveraging"), ["EMAWeightAveraging", "best.ckpt"]),
    "swapped weights": (callback("StochasticWeightAveraging", "swa_lrs: 0.01"), ["Stochastic", "best.ckpt"]),
    "learning rate finder": (callback("LearningRateFinder"), ["LearningRateFinder", "--lr"]),
    "batch size finder": (callback("BatchSizeFinder"), ["BatchSizeFinder", "--batch-size"]),
    "pruning": (callback("ModelPruning", "pruning_fn: l1_unstructured"), ["ModelPruning", "resume"]),
    "finetuning": (callback("BackboneFinetuning"), ["BackboneFinetuning", "--model.weights"]),
    "callback without its argument": (["--trainer.callbacks", "EarlyStopping"], ["EarlyStopping", "monitor"]),
    "callback that watches nothing": (
        ["--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: val_acc}}]"],
        ["val_acc", "val_loss, val_accuracy"],
    ),
    "callback without a validation": (
        ["--data.val_size=0", "--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: val_loss}}]"],
        ["val_loss", "no validation"],
    ),
    "saving never": (["--save-every", "0"], ["run.save_every", "30s"]),
    "saving by minutes": (["--save-every", "5m"], ["run.save_every", "5m"]),
    "keeping nothing": (["--keep", "0"], ["run.keep", "at least 1"]),
    "an unknown fault": (["--inject", "explode"], ["run.inject", "kill:rank=1,step=50"]),
    "a fault of no rank": (["--inject", "kill:rank=1,step=1"], ["run.inject", "ranks are 0 to 0"]),
    "a fault after the end": (["--inject", "nan:rank=0,step=999", "--max-steps", "9"], ["run.inject", "1 to 9"]),
    "automatic resume without a run folder": (["--resume", "auto"], ["--run-dir"]),
    "resume from a folder without checkpoints": (["--resume", "."], ["no valid checkpoint"]),
    "a name that is too long": (["--run-dir", "x" * 300], ["cannot be written", "too long"]),
    "a validation after no batch": (["--trainer.val_check_interval", "0"], ["val_check_interval", "is 0"]),
    "a validation before the first batch": (["--trainer.val_check_interval", "-1"], ["val_check_interval", "is -1"]),
    "a validation after two and a half": (["--trainer.val_check_interval", "2.5"], ["val_check_interval", "2.5"]),
    "a validation after the epoch": (["--trainer.val_check_interval", "100000"], ["100000", "an epoch has 859"]),
    "a validation after the last step": (
        ["--trainer.val_check_interval", "9", "--max-steps", "5"],
        ["val_check_interval is 9", "the last epoch has 5 batches"],
    ),
    "a validation at some time": (["--trainer.val_check_interval", "often"], ["val_check_interval", "DD:HH:MM:SS"]),
    "a time in words": (["--trainer.max_time", "soon"], ["trainer.max_time", "DD:HH:MM:SS", "soon"]),
    "a time without a unit": (["--trainer.max_time", "5"], ["trainer.max_time", "DD:HH:MM:SS", "5"]),
    "a time in letters": (["--trainer.max_time", "{hours: x}"], ["trainer.max_time", "DD:HH:MM:SS"]),
    "an unknown profiler": (["--trainer.profiler", "magic"], ["trainer.profiler", "simple", "magic"]),
    "a profiler of TPUs": (["--trainer.profiler", "xla"], ["trainer.profiler", "simple", "xla"]),
    "a logger without a place": (
        ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "/proc/nope"],
        ["trainer.logger", "/proc/nope"],
    ),
    "fewer epochs than none": (["--trainer.min_epochs", "-3"], ["trainer.min_epochs", "-3"]),
    "a negative sanity check": (["--trainer.num_sanity_val_steps", "-5"], ["num_sanity_val_steps", "-5"]),
    "more steps than there are": (
        ["--trainer.min_steps", "50", "--max-steps", "5"],
        ["trainer.min_steps is 50", "5 steps", "--max-steps"],
    ),
    "more epochs than there are": (
        ["--trainer.min_epochs", "5", "--epochs", "2"],
        ["trainer.min_epochs is 5", "2 epochs", "--epochs"],
    ),
    "epochs of a test": (["test", "--ckpt", "x", "--epochs", "3"], ["--epochs", "test does not train", "remove it"]),
    "a kept checkpoint of a prediction": (["predict", "--ckpt", "x", "--run.keep", "3"], ["--run.keep", "predict"]),
    "images without predict": (["--images", "x"], ["--images", "predict"]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command_line_is_rejected(program: Program, case: str) -> None:
    words, parts = COMMANDS[case]
    before = set(program.folder.iterdir())
    assert_rejected(program(*words), *parts)
    left = {path.name for path in set(program.folder.iterdir()) - before}
    assert left <= {"stdout.txt", "stderr.txt"}


CONFIGS = {
    "unknown section": ("modle:\n  lr: 0.1\n", ["modle"]),
    "unknown key": ("model:\n  lrr: 0.1\n", ["model.lrr", "did you mean model.lr?"]),
    "wrong type": ("data:\n  batch_size: 1.5\n", ["data.batch_size", "int", "1.5"]),
    "text for a number": ("model:\n  lr: 1e-3x\n", ["model.lr", "1e-3x"]),
    "class of another package": ("trainer:\n  callbacks:\n  - class_path: subprocess.Popen\n", ["subprocess.Popen"]),
    "another module": ("trainer:\n  logger:\n    class_path: evil_module.Logger\n", ["evil_module"]),
    "python object": ("model: !!python/object/apply:os.system ['touch pwned']\n", []),
    "no YAML": ("{: {]", ["config.yaml is not YAML", "in line 1, column"]),
    "a list": ("- 1\n- 2\n", []),
    "nothing": ("", ["config.yaml", "no settings"]),
    "a scalar for a section": ("model: 3\n", ["model must be a section"]),
    "resume in a file": ("run:\n  resume: some\n", ["run.resume", "--resume"]),
    "a linked key": ("model:\n  seed: 3\n", ["model.seed", "seed_everything"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configuration_file_is_rejected(program: Program, case: str) -> None:
    text, parts = CONFIGS[case]
    path = program.folder / "config.yaml"
    path.write_text(text)
    assert_rejected(program("--config", path), *parts)
    assert not (program.folder / "runs").exists()
    assert not (program.folder / "pwned").exists()


def test_a_configuration_that_is_no_text_is_rejected(program: Program) -> None:
    for content in (b"\xff\xfe\x00model", "model:\n  lr: 0.1\n".encode("utf-16")):
        (program.folder / "config.yaml").write_bytes(content)
        assert_rejected(program("--config", program.folder / "config.yaml"), "config.yaml", "save it as UTF-8")


@pytest.mark.parametrize(("name", "package"), [("WandbLogger", "wandb"), ("MLFlowLogger", "mlflow")])
def test_a_logger_without_its_package_is_rejected(program: Program, name: str, package: str) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    assert_rejected(program("--trainer.logger", name), f"{name} needs the package {package}, which is not installed.\n")


def test_a_class_of_another_package_is_rejected_before_its_module_is_imported(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program.folder / "evil_module.py").write_text("open('imported', 'w').close()\nclass Logger: pass\n")
    (program.folder / "config.yaml").write_text("trainer:\n  logger:\n    class_path: evil_module.Logger\n")
    monkeypatch.syspath_prepend(program.folder)
    assert_rejected(
        program("--config", program.folder / "config.yaml"), "evil_module.Logger", "lightning.pytorch.loggers"
    )
    assert not (program.folder / "imported").exists()


def test_a_class_of_lightning_may_be_named() -> None:
    path = "lightning.pytorch.callbacks.LambdaCallback"
    assert parse([f"--trainer.callbacks=[{{class_path: {path}}}]"]).options == ("callbacks",)


def test_damaged_data_are_rejected(program: Program) -> None:
    root = program.folder / "data"
    root.mkdir()
    for path in FILES.glob("*.gz"):
        (root / path.name).write_bytes(path.read_bytes())
    labels = root / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-100])
    assert_rejected(program("--data.root", root), "t10k-labels-idx1-ubyte")
    assert not (program.folder / "runs").exists()


def test_a_run_folder_that_holds_a_run_is_rejected_and_left_as_it_was(program: Program) -> None:
    folder = program.folder / "taken"
    folder.mkdir()
    (folder / "result.json").write_text("precious")
    assert_rejected(program("--run-dir", folder), "taken", "result.json")
    assert (folder / "result.json").read_text() == "precious"
    assert not (folder / "config.yaml").exists()


def test_a_run_folder_that_cannot_be_made_is_rejected(program: Program) -> None:
    (program.folder / "file").write_text("")
    assert_rejected(program("--run-dir", program.folder / "file" / "run"), "file/run")


def test_a_checkpoint_that_is_no_checkpoint_is_rejected(program: Program) -> None:
    (program.folder / "some.ckpt").write_text("not a checkpoint")
    assert_rejected(program("test", "--ckpt", program.folder / "some.ckpt"), "some.ckpt")
    (program.folder / "empty").mkdir()
    assert_rejected(program("test", "--ckpt", program.folder / "empty"), "empty", "best.ckpt")


def test_an_image_that_cannot_be_read_is_rejected(program: Program) -> None:
    trained = program.train("--max-steps", 1, "--data.train_size", 200, "--data.val_size", 0, "--data.test_size", 10)
    (program.folder / "digit.png").write_bytes(b"no image")
    assert_rejected(program("predict", "--ckpt", trained, "--images", program.folder / "digit.png"), "digit.png")
    assert_rejected(program("predict", "--ckpt", trained, "--images", "nowhere"), "nowhere")
    both = program("predict", "--ckpt", trained, "--images", "nowhere", "digit.png", "--run-dir", "none")
    assert_rejected(both, "2 of 2 images cannot be read", "nowhere", "digit.png")
    assert not (program.folder / "none").exists()


@pytest.mark.parametrize("words", [["--model.lr", "0.1", "--lr", "0.1"], ["--lr=0.1", "--model.lr=0.1"]])
def test_a_short_flag_that_agrees_with_its_long_form_is_accepted(words: list[str]) -> None:

    assert parse(words).experiment().model.lr == 0.1


def test_wrong_settings_in_python_are_a_value_error() -> None:
    from lit_mnist.experiment import DataSettings

    with pytest.raises(ValueError, match="batch_size") as caught:
        DataSettings(batch_size=0)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        (["--precision=16"], "trainer", "precision", "16-mixed"),
        (["--precision=bf16"], "trainer", "precision", "bf16-mixed"),
        (["--trainer.precision=32"], "trainer", "precision", "32-true"),
        (["--precision=64", "--trainer.precision=64-true"], "trainer", "precision", "64-true"),
        (["--devices=-1"], "trainer", "devices", "auto"),
        (["--devices", "-1"], "trainer", "devices", "auto"),
        (["--trainer.accelerator=cuda"], "trainer", "accelerator", "gpu"),
        (["fit", "--ckpt_path=some.ckpt"], "run", "resume", "some.ckpt"),
    ],
)
def test_lightning_s_spelling_is_accepted(words: list[str], section: str, key: str, value: str) -> None:
    assert getattr(getattr(parse(words).experiment(), section), key) == value


def test_ckpt_path_names_the_checkpoint_to_evaluate() -> None:
    assert parse(["test", "--ckpt_path", "some.ckpt"]).checkpoint == "some.ckpt"


@pytest.mark.parametrize(
    ("engine", "words", "proposed"),
    [
        ("fabric", ["--save-evry", "3"], "--save-every"),
        ("lightning", ["test", "--resum", "x"], "--resume"),
        ("lightning", ["compare", "--max_restart", "1"], "--max-restarts"),
        ("raw_ddp", ["--server", "2"], "--servers"),
    ],
)
def test_a_message_proposes_only_what_is_accepted(engine: str, words: list[str], proposed: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(words, engine)
    assert f"{proposed}?" not in str(caught.value)
