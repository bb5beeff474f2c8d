"""The configuration files: what they say is what is used."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from lit_mnist.cli.request import parse
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.plan import make_plan
from lit_mnist.experiment.reference import reference
from lit_mnist.experiment.schema import builtin_options
from lit_mnist.run.trainer_settings import TrainerSettings
from lit_mnist.trainer import LitTrainer


def test_the_default_configuration_is_the_code_s_defaults() -> None:
    path = ROOT / "configs" / "default.yaml"
    assert parse([f"--config={path}"]).experiment() == parse([]).experiment() == Experiment()
    assert len(path.read_text().splitlines()) < 24
    assert "lr" in yaml.safe_load(path.read_text())["model"]


def test_the_file_with_all_options_is_current() -> None:
    text = (ROOT / "configs" / "all-options.yaml").read_text()
    assert text == reference(), "run: python -m lit_mnist.experiment.reference > configs/all-options.yaml"
    assert yaml.safe_load(text) == Experiment().to_dict()
    for option in builtin_options().values():
        assert option.help.split()[0] in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_states_only_what_makes_it(path: Path) -> None:
    """What equals the default is not repeated, except for what one looks for in every recipe."""
    if path.stem in {"default", "all-options"}:
        return
    default = Experiment().to_dict()
    for section, values in yaml.safe_load(path.read_text()).items():
        for key, value in values.items() if isinstance(values, dict) else []:
            assert key in {"optimizer", "lr", "batch_size"} or default[section][key] != value, f"{section}.{key}"


@pytest.mark.parametrize("name", ["default", "all-options", "seed", "basicnet", "gpu"])
def test_a_configuration_says_only_what_is_accepted(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    found = parse([f"--config={path}"]).experiment().to_dict()
    for section, values in yaml.safe_load(path.read_text()).items():
        for key, value in values.items() if isinstance(values, dict) else []:
            assert found[section][key] == value


def test_a_packaged_configuration_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (ROOT / "configs").glob("*.yaml"):
        assert parse([f"--config=lit_mnist:{path.name}"]) == parse([f"--config={path}"])


def test_a_flag_stands_over_a_file_and_a_file_over_the_defaults() -> None:
    path = ROOT / "configs" / "basicnet.yaml"
    model = parse([f"--config={path}", "--model.lr=0.5"]).experiment().model
    assert (model.net, model.lr, model.optimizer) == ("basicnet", 0.5, "adamw")


def test_a_batch_per_rank_grows_with_the_ranks() -> None:
    experiment = parse([f"--config={ROOT / 'configs' / 'seed.yaml'}"]).experiment()
    assert [make_plan(experiment, ranks, 60_000).batch_size for ranks in (1, 2, 4)] == [32, 64, 128]
    assert [make_plan(experiment, ranks, 60_000).steps_per_epoch for ranks in (1, 2, 4)] == [1875, 937, 468]


def test_the_trainer_s_own_parameters_have_the_experiment_s_defaults() -> None:
    """Two signatures name the same options: where a default is stated in both, it is the same."""
    stated = LitTrainer.__init__.__kwdefaults__
    for field in fields(TrainerSettings):
        if field.name in stated:
            assert stated[field.name] == asdict(TrainerSettings())[field.name]


@pytest.mark.parametrize(("max_steps", "accumulate"), [(-1, 1), (7, 1), (25, 1), (-1, 4), (7, 4), (3, 4)])
def test_a_plan_s_epochs_add_up_to_its_steps(max_steps: int, accumulate: int) -> None:
    experiment = Experiment().replace("data", batch_size=100)
    experiment = experiment.replace("trainer", max_epochs=3, max_steps=max_steps, accumulate_grad_batches=accumulate)
    plan = make_plan(experiment, 2, 1050)
    assert (plan.batches_per_epoch, plan.dropped) == (10, 50)
    steps = 0
    for epoch in range(plan.epochs):
        batches = plan.batches_in_epoch(epoch)
        assert batches > 0
        windows = [plan.accumulation_window(batch) for batch in range(batches)]
        assert all(window == accumulate or batch >= 10 - 10 % accumulate for batch, window in enumerate(windows))
        steps += -(-batches // accumulate)
    assert steps == plan.total_steps
    assert plan.batches_in_epoch(plan.epochs) == 0
