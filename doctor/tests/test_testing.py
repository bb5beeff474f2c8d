"""`assert_same_on_ranks`: bugs of public functions before and after their fix, healthy functions, and rejections."""

import multiprocessing
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from doctor_support import ROOT
from torch import nn

from ddp_doctor.errors import InputError
from ddp_doctor.testing import assert_same_on_ranks

X, Y, ROW = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5, torch.arange(8)
HITS = {"batch": (torch.arange(7), torch.tensor([1.0, 1, 0, 0, 0, 1, 0]))}


def net(*middle):
    return nn.Sequential(nn.Linear(6, 12), *middle, nn.Tanh(), nn.Linear(12, 5))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sums):
        ctx.sums, parts = sums, [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradients):
        if ctx.sums:
            dist.all_reduce(gradients := gradients.contiguous())
        return gradients[dist.get_rank()], None


def gathered(x, how):
    return torch.cat([*Gather.apply(x, how == "with gradient")])


def total(x, gradient=False):
    if gradient:
        return Gather.apply(x, True).sum(0)
    dist.all_reduce((x := x.clone()).data)
    return x


def views(model, batch):
    return F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[0].flip(1)), dim=1)


def info_nce(model, batch, how, local=False):
    z, q = views(model, batch)
    queries, first = (z, len(z) * dist.get_rank()) if local else (gathered(z, how), 0)
    value = F.cross_entropy(queries @ gathered(q, how).T / 0.2, first + torch.arange(len(queries)))
    times = dist.get_world_size() if how == "compensated" else 1
    return value.detach() + (value - value.detach()) * times


def barlow(model, batch, gradient):
    z, q = ((view - view.mean(0)) / view.std(0) for view in views(model, batch))
    return (total(z.T @ q / len(z) / dist.get_world_size(), gradient) - torch.eye(5)).square().sum()


def codes(model, batch, reduced):
    loss, own = model(batch[0]).square().mean(), model[0](batch[0]).detach().mean(0)
    model[1].running_mean = 0.9 * model[1].running_mean + (total(own) / dist.get_world_size() if reduced else own)
    return loss


def tokens(model, batch, times=1):
    count = (batch[1] != -100).sum()
    value = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return value / count if times is None else value / total(count) * dist.get_world_size() ** times


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def step(model, optimizer, batch, bypass=False, change=lambda model: None):
    mean(model.module if bypass else model, batch).backward()
    change(model)
    optimizer.step()


EVEN, FEATURES, SGD = {"model": net, "batch": (X, Y)}, {"model": net, "batch": (X,)}, partial(torch.optim.SGD, lr=0.1)
NORM, SYNCHRONIZED = nn.BatchNorm1d(12), nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(12)))
STOPPED = (lambda model, batch: (model(batch[0]) * model(batch[0].flip(1)).detach()).mean(), FEATURES)
STEP, LABELS = EVEN | {"optimizer": SGD}, EVEN | {"batch": (X, Y.where(ROW != 2, -100))}
BUGS = {
    "modelscope/ms-swift#10081": ("LD015", info_nce, "how", "cut", "compensated", FEATURES),
    "facebookresearch/SLIP#31": ("LD015", partial(info_nce, local=True), "how", "cut", "with gradient", FEATURES),
    "lightly-ai/lightly#1977": ("LD015", barlow, "gradient", False, True, FEATURES | {"reference": False}),
    "espnet/espnet#6284": ("LD015", codes, "reduced", False, True, FEATURES | {"model": net(NORM.eval())}),
    "huggingface/transformers#34191": ("LD013", tokens, "times", None, 1, LABELS),
    "meta-pytorch/torchtune#2172": ("LD014", tokens, "times", 0, 1, LABELS),
    "NVIDIA-NeMo/Automodel#3846": ("LD014", tokens, "times", 2, 1, LABELS),
    "bytetriper/RAE#40": ("LD009", step, "bypass", True, False, STEP),
}


@pytest.mark.parametrize("thread", BUGS)
def test_a_bug_is_named_and_its_fix_is_silent(thread):
    code, function, option, before, after, arguments = BUGS[thread]
    with pytest.raises(AssertionError, match=rf"^{code} .*\n(.*\n)+  Fix: "):
        assert_same_on_ranks(partial(function, **{option: before}), **arguments)
    assert_same_on_ranks(partial(function, **{option: after}), **arguments)


def boxes(model, batch):
    count = total(torch.tensor(float(sum(map(len, batch[1]))))) / dist.get_world_size()
    return sum((model(image) - box.sum()).abs().sum() for image, box in zip(*batch, strict=True)) / count


HEALTHY = {
    "a mean": (mean, EVEN),
    "on three ranks": (mean, EVEN | {"batch": (X[:6], Y[:6]), "n": 3}),
    "32 bits": (torch.autocast("cpu", torch.bfloat16)(lambda m, b: F.cross_entropy(m(b[0]).float(), b[1])), EVEN),
    "layer norm": (mean, EVEN | {"model": net(nn.LayerNorm(12))}),
    "uneven shards": (tokens, EVEN | {"splits": "uneven"}),
    "synchronized batch norm": (mean, EVEN | {"model": SYNCHRONIZED}),
    "batch norm in evaluation": (mean, EVEN | {"model": net(NORM.eval())}),
    "dropout": (mean, EVEN | {"model": lambda: net(nn.Dropout(0.5))}),
    "mixup": (lambda m, b: mean(m, (b[0] + torch.rand(()) * b[0][torch.randperm(len(b[0]))], b[1])), EVEN),
    "a stopped gradient": STOPPED,
    "a list of samples": (boxes, EVEN | {"batch": ([*X], tuple(x[: i % 3 + 1] for i, x in enumerate(X)))}),
    "a step": (step, STEP),
    "a step of Adam": (step, STEP | {"optimizer": torch.optim.Adam, "model": SYNCHRONIZED}),
    "a metric": (lambda b: {"right": total(b[1].sum()) / total(torch.tensor(len(b[1])))}, HITS | {"splits": "uneven"}),
    "clipped": (partial(step, change=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01)), STEP),
    "an object": (lambda m, b: SimpleNamespace(compute=lambda: total((m(b[0]).argmax(1) == b[1]).sum())), EVEN),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_silent(name):
    function, arguments = HEALTHY[name]
    assert_same_on_ranks(function, **arguments)


CALLS = []
SAID = {
    "LD012 .*\n(.*\n){3}  0.weight": (step, STEP | {"model": lambda: net(nn.BatchNorm1d(12))}),
    "LD013 .* count 0.625, 0.375": (mean, EVEN | {"splits": "uneven"}),
    "LD013 .* is nan": (mean, EVEN | {"batch": (X, Y.where(ROW < 4, -100))}),
    "LD014 .* 0.5 times": (lambda m, b: mean(m, b) / int(os.environ.get("WORLD_SIZE", "1")), EVEN),
    "LD014 .* 0.5 times, as of a sum": (lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), EVEN),
    "LD015 .*negatives": (lambda m, b: (views(m, b)[0].T @ views(m, b)[1]).exp().mean(), FEATURES),
    "LD011 ": (partial(step, change=lambda m: m.module[0].weight.grad.mul_(1 + dist.get_rank())), STEP),
    "LD024 .*reported": (lambda m, b: mean(m, b) + dist.get_world_size(), EVEN),
    "LD024 .*\n  the metric: 0.4": (lambda b: total(b[1].mean()) / dist.get_world_size(), HITS | {"splits": "uneven"}),
    "LD024 .*\n.* on rank 1": (lambda m, b: (m(b[0]) > 0).double().mean(), EVEN),
    "LD027 (.*\n)*.*test_testing": (lambda m, b: dist.get_rank() or dist.barrier(), EVEN | {"timeout": 2}),
    "On(.*\n)*ZeroDivisionError": (lambda m, b: 1 / (1 - dist.get_rank()), EVEN),
    "8 samples on 3": (mean, EVEN | {"n": 3}),
    ".*neither a loss nor a metric": (lambda model, batch: "0.5", EVEN),
    ".*stopped gradient": (lambda *of: STOPPED[0](*of) / dist.get_world_size(), FEATURES | {"reference": False}),
    ".*keeps a state": (lambda model, batch: CALLS.append(1) or mean(model, batch) * len(CALLS), EVEN),
}


@pytest.mark.parametrize("said", SAID)
def test_another_fault_is_named_and_what_cannot_be_compared_is_rejected(said):
    function, arguments = SAID[said]
    with pytest.raises(AssertionError if said.startswith(("LD", "On")) else InputError, match=f"^{said}"):
        assert_same_on_ranks(function, **arguments)
    assert not multiprocessing.active_children()


def test_no_process_is_started_without_a_question(monkeypatch):
    monkeypatch.setattr("ddp_doctor.testing.on_ranks", None)
    state = torch.get_rng_state()
    assert_same_on_ranks(mean, **EVEN | {"model": lambda: net(nn.Dropout(0.5))})
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() is torch.float32


def test_the_page_says_what_its_example_does(request):
    page, example = (ROOT / "docs" / "testing.md").read_text(), {}
    source, shown = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    exec(source, example)  # noqa: S102
    example["test_mean"](fixture := request.getfixturevalue("assert_same_on_ranks"))
    with pytest.raises(AssertionError) as failure:
        example["test_clip_loss"](fixture)
    assert all(line in str(failure.value) for line in shown.splitlines())
