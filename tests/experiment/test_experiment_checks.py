"""Settings that must fit each other, and those of earlier releases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.checks import check_experiment
from lit_mnist.experiment.plan import make_plan
from lit_mnist.experiment.schema import convert
from lit_mnist.training.loss import mean_loss


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_the_learning_rate_follows_the_ranks(scale: str, factor: float) -> None:
    experiment = Experiment().replace("model", lr=0.01, lr_scale=scale).replace("data", batch_per="rank")
    check_experiment(experiment)
    assert make_plan(experiment, 2, 60_000).lr == pytest.approx(0.01 * factor)


def test_a_learning_rate_that_follows_a_fixed_batch_is_rejected() -> None:
    with pytest.raises(InputError, match=r"lr_scale linear requires data\.batch_per rank"):
        check_experiment(Experiment().replace("model", lr_scale="linear"))


def test_defaults_of_removed_settings_are_accepted_and_other_values_are_not() -> None:
    earlier = {"data.image_size": 256, "data.border": "ignore", "data.download": False}
    assert convert({**earlier, "model.checkpoint_activations": False, "model.lr": 0.5}) == {"model.lr": 0.5}
    with pytest.raises(InputError, match=r"Unknown key data\.image_size"):
        convert({"data.image_size": 128})


def test_the_loss_is_bit_identical_to_torch_s() -> None:
    logits, targets = torch.randn(50, 10), torch.randint(0, 10, (50,))
    assert torch.equal(mean_loss(logits, targets, 0.1), F.cross_entropy(logits, targets, label_smoothing=0.1))
