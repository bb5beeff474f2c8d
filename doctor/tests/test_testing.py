"""`assert_same_on_ranks`: bugs of public functions before and after their fix, healthy functions, and rejections."""

import multiprocessing
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from doctor_support import CHILD_ENV, ROOT
from torch import nn

from ddp_doctor.errors import InputError
from ddp_doctor.testing import assert_same_on_ranks

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
HITS = (torch.arange(7), torch.tensor([1.0, 1, 0, 0, 0, 1, 0]))


def net(*middle):
    return nn.Sequential(nn.Linear(6, 12), *middle, nn.Tanh(), nn.Linear(12, 5))


def synchronized():
    return nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(12)))


class Codebook(nn.Linear):
    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("codes", torch.zeros(5))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sums):
        ctx.sums, parts = sums, [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *gradients):
        gradients = torch.stack(gradients)
        if ctx.sums:
            dist.all_reduce(gradients)
        return gradients[dist.get_rank()], None


def gathered(x, how):
    if how == "detached":
        parts = [part.detach() for part in Gather.apply(x, False)]
        parts[dist.get_rank()] = x
        return torch.cat(parts)
    return torch.cat(Gather.apply(x, how == "with gradient"))


def total(x, gradient=False):
    if gradient:
        return torch.stack(Gather.apply(x, True)).sum(0)
    x = x.clone()
    dist.all_reduce(x.data)
    return x


def views(model, x):
    return F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)


def info_nce(model, batch, how, local=False, times=0):
    z, q = views(model, batch[0])
    queries, first = (z, len(z) * dist.get_rank()) if local else (gathered(z, how), 0)
    value = F.cross_entropy(queries @ gathered(q, how).T / 0.2, first + torch.arange(len(queries)))
    return value.detach() + (value - value.detach()) * dist.get_world_size() ** times


def barlow(model, batch, gradient):
    z, q = ((view - view.mean(0)) / view.std(0) for view in views(model, batch[0]))
    c = total(z.T @ q / len(z) / dist.get_world_size(), gradient)
    return (c - torch.eye(len(c))).square().sum()


def sigreg(model, batch, gradient):
    t = model(batch[0]) @ torch.randn(5, 7)
    count = len(t) * dist.get_world_size()
    real, imaginary = (total(part.sum(0), gradient) / count for part in (t.cos(), t.sin()))
    return ((real - 0.5).square() + imaginary.square()).mean() * count


def tokens(model, batch, times=0):
    count = total((batch[1] != -100).sum())
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / count * dist.get_world_size() ** times


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def codes(model, batch, reduced):
    z = model(batch[0])
    own = z.detach().mean(0)
    model.codes.lerp_(total(own) / dist.get_world_size() if reduced else own, 0.1)
    return (z - 1).square().mean()


def step(model, optimizer, batch, forward=None, change=lambda model: None):
    optimizer.zero_grad()
    mean(forward or model, batch).backward()
    change(model)
    optimizer.step()


def merged(batch, once):
    index, hits = (torch.cat(Gather.apply(part, False)) for part in batch)
    return hits[[index.tolist().index(i) for i in set(index.tolist())]].mean() if once else hits.mean()


def right(batch, divisor):
    hits, ranks = batch[1], dist.get_world_size()
    return total(hits.mean()) / ranks if divisor == "ranks" else {"accuracy": total(hits.sum()) / divisor(hits)}


EVEN, FEATURES = {"model": net, "batch": (X, Y)}, {"model": net, "batch": (X,)}
LABELS, OTHERS = (EVEN | {"batch": (X, Y.where(torch.arange(8) != row, -100))} for row in (2, 5))
SGD, UNEVEN = EVEN | {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, {"batch": HITS, "splits": "uneven"}
BUGS = {
    # Halved on two ranks: each computes the loss of all samples, with a gradient through its own alone.
    "modelscope/ms-swift#10081": ("LD015", info_nce, {"how": "detached"}, {"how": "detached", "times": 1}, FEATURES),
    "facebookresearch/SLIP#31": (
        "LD015",
        partial(info_nce, local=True),
        {"how": "detached"},
        {"how": "with gradient"},
        FEATURES,
    ),
    "lightly-ai/lightly#1528": (
        "LD015",
        partial(info_nce, local=True),
        {"how": "unsummed"},
        {"how": "with gradient"},
        FEATURES,
    ),
    "facebookresearch/vissl#123": ("LD015", info_nce, {"how": "detached"}, {"how": "with gradient"}, FEATURES),
    # It also normalizes with the samples of a rank.
    "lightly-ai/lightly#1977": (
        "LD015",
        barlow,
        {"gradient": False},
        {"gradient": True},
        FEATURES | {"reference": False},
    ),
    "lightly-ai/lightly#1920": ("LD015", sigreg, {"gradient": False}, {"gradient": True}, FEATURES),
    "espnet/espnet#6284": ("LD015", codes, {"reduced": False}, {"reduced": True}, FEATURES | {"model": Codebook}),
    "huggingface/transformers#34191": ("LD013", mean, None, partial(tokens, times=1), LABELS),
    "huggingface/transformers#37766": ("LD013", mean, None, partial(tokens, times=1), OTHERS | {"n": 4}),
    "meta-pytorch/torchtune#2172": ("LD014", tokens, {"times": 0}, {"times": 1}, LABELS),
    "NVIDIA-NeMo/Automodel#3846": ("LD014", tokens, {"times": 2}, {"times": 1}, LABELS),
    "bytetriper/RAE#40": ("LD009", lambda m, o, b: step(m, o, b, m.module), None, step, SGD),
    "roboflow/rf-detr#1507": ("LD023", merged, {"once": False}, {"once": True}, UNEVEN | {"splits": "padded"}),
    "allenai/allennlp#4715": (
        "LD024",
        right,
        {"divisor": len},
        {"divisor": lambda hits: total(torch.tensor(len(hits)))},
        UNEVEN,
    ),
    "huggingface/trl#7010": (
        "LD024",
        right,
        {"divisor": "ranks"},
        {"divisor": lambda hits: total(torch.tensor(len(hits)))},
        UNEVEN,
    ),
}


@pytest.mark.parametrize("thread", BUGS)
def test_a_bug_is_named_and_its_fix_is_silent(thread):
    code, function, before, after, arguments = BUGS[thread]
    with pytest.raises(AssertionError, match=rf"^{code} .*\n(.*\n)+  Fix: "):
        assert_same_on_ranks(partial(function, **before or {}), **arguments)
    assert_same_on_ranks(partial(function, **after) if before else after, **arguments)
    assert not multiprocessing.active_children()


def mixup(model, batch):
    share, order = torch.rand(()), torch.randperm(len(batch[0]))
    mixed = share * batch[0] + (1 - share) * batch[0][order]
    return share * mean(model, (mixed, batch[1])) + (1 - share) * mean(model, (mixed, batch[1][order]))


def noisy(model, batch):
    return mean(model, (batch[0] + torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(3)), batch[1]))


def sim_siam(model, batch):
    z, q = views(model, batch[0])
    return -(z * q.detach()).sum(1).mean()


def boxes(model, targets):
    count = total(torch.tensor(float(sum(len(target["y"]) for target in targets)))) / dist.get_world_size()
    return sum((model(target["x"]) - target["y"].sum()).abs().sum() for target in targets) / count


def accumulating(model, optimizer, batch):
    with model.no_sync():
        (mean(model, [part[::2] for part in batch]) / 2).backward()
    (mean(model, [part[1::2] for part in batch]) / 2).backward()
    optimizer.step()


def scaled(model, optimizer, batch):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean(model, batch)).backward()
    scaler.step(optimizer)


def halves(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def correct(model, batch):
    return SimpleNamespace(compute=lambda: [total((model(batch[0]).argmax(1) == batch[1]).double().sum()), True])


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


HEALTHY = {
    "a mean": (mean, EVEN),
    "on three ranks": (mean, EVEN | {"batch": (X[:6], Y[:6]), "n": 3}),
    "a model that is made": (mean, EVEN | {"model": net()}),
    "32 bits and autocast": (halves, EVEN | {"batch": {"x": X, "y": Y}}),
    "uneven shards and the global count": (partial(tokens, times=1), EVEN | {"splits": "uneven"}),
    "layer norm": (mean, EVEN | {"model": lambda: net(nn.LayerNorm(12))}),
    "synchronized batch norm": (mean, EVEN | {"model": synchronized}),
    "batch norm in evaluation": (mean, EVEN | {"model": lambda: net(nn.BatchNorm1d(12)).eval()}),
    "dropout": (mean, EVEN | {"model": lambda: net(nn.Dropout(0.5))}),
    "dropout and a question": (partial(tokens, times=1), LABELS | {"model": lambda: net(nn.Dropout(0.5))}),
    "mixup": (mixup, EVEN),
    "noise of an own generator": (noisy, EVEN),
    "a stopped gradient": (sim_siam, FEATURES),
    "a list of samples": (boxes, EVEN | {"batch": [{"x": x, "y": x[: i % 3 + 1]} for i, x in enumerate(X)]}),
    "a step": (step, SGD),
    "a step of Adam": (step, SGD | {"optimizer": torch.optim.Adam, "model": synchronized}),
    "accumulated gradients": (accumulating, SGD),
    "clipped gradients": (partial(step, change=clip), SGD),
    "a scaler": (scaled, SGD),
    "an object with compute()": (correct, EVEN),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_silent(name):
    function, arguments = HEALTHY[name]
    assert_same_on_ranks(function, **arguments)


OTHER = {
    "LD012 ": (mean, EVEN | {"model": lambda: net(nn.BatchNorm1d(12))}),
    "LD012 .*\n(.*\n){3}  0.weight": (step, SGD | {"model": lambda: net(nn.BatchNorm1d(12))}),
    "LD013 .* is nan": (mean, EVEN | {"batch": (X, Y.where(torch.arange(8) < 4, -100))}),
    "LD014 .*a sum": (lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), EVEN),
    "LD015 .*negatives": (lambda m, b: (views(m, b[0])[0].T @ views(m, b[0])[1]).exp().mean(), FEATURES),
    "LD011 ": (partial(step, change=lambda m: m.module[0].weight.grad.mul_(1 + dist.get_rank())), SGD),
    "LD024 .*reported": (lambda m, b: mean(m, b) + dist.get_world_size(), EVEN),
    "LD024 .*its own": (lambda m, b: (m(b[0]) > 0).double().mean(), EVEN),
    "LD027 .*\n  rank 0: .*test_testing": (lambda m, b: dist.get_rank() or dist.barrier(), EVEN | {"timeout": 4}),
    "On(.*\n)*ZeroDivisionError": (lambda m, b: 1 / (1 - dist.get_rank()), EVEN),
}


@pytest.mark.parametrize("said", OTHER)
def test_another_fault_is_named(said):
    function, arguments = OTHER[said]
    with pytest.raises(AssertionError, match=f"^{said}"):
        assert_same_on_ranks(function, **arguments)
    assert not multiprocessing.active_children()


CALLS = []
REJECTED = {
    "or choose another": (mean, EVEN | {"n": 3}),
    "leave one out": (mean, EVEN | {"splits": "padded"}),
    "not 2 and 'odd'": (mean, EVEN | {"splits": "odd"}),
    "needs a `model`": (step, SGD | {"model": None}),
    "has no tensor": (mean, {"batch": 1}),
    "neither a loss nor a metric": (lambda model, batch: "0.5", EVEN),
    "is one number": (lambda model, batch: model(batch[0]), EVEN),
    "does not": (lambda model, optimizer, batch: optimizer.step(), SGD),
    "stopped gradient": (sim_siam, FEATURES | {"reference": False}),
    "keeps a state": (lambda model, batch: CALLS.append(1) or mean(model, batch) * len(CALLS), EVEN),
}


@pytest.mark.parametrize("said", REJECTED)
def test_what_cannot_be_compared_is_rejected(said):
    function, arguments = REJECTED[said]
    with pytest.raises(InputError, match=said):
        assert_same_on_ranks(function, **arguments)


def test_no_process_is_started_without_a_question(monkeypatch):
    monkeypatch.setattr("ddp_doctor.testing.on_ranks", None)
    state = torch.get_rng_state()
    assert_same_on_ranks(mean, **EVEN | {"model": lambda: net(nn.Dropout(0.5))})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32 and not dist.is_initialized()


def test_the_page_shows_what_its_example_says():
    page = (ROOT / "docs" / "testing.md").read_text()
    source, shown = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    Path("test_page.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=200, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert all(line in done.stdout for line in shown.splitlines())
