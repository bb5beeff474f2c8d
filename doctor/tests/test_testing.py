"""`assert_same_on_ranks`: bugs of public functions before and after their fix, healthy functions, and what it rejects."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from doctor_support import CHILD_ENV
from torch import nn

from ddp_doctor.errors import InputError
from ddp_doctor.testing import assert_same_on_ranks

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
# The ranks have 2 and 4 labels.
UNEQUAL = torch.tensor([0, 1, -100, -100, 2, 3, 4, 1])


def net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), *middle, nn.Tanh(), nn.Linear(12, 5))


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sums):
        ctx.sums = sums
        parts = [torch.empty_like(x) for _ in range(ranks())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *gradients):
        gradients = torch.stack(gradients)
        if ctx.sums:
            dist.all_reduce(gradients)
        return gradients[dist.get_rank()], None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    backward = forward


def total(x, gradient=False):
    """Sums over the ranks, as in losses: in place and without a gradient, or with one."""
    if gradient:
        return Total.apply(x)
    x = x.clone()
    dist.all_reduce(x.data)
    return x


def gathered(x, kind):
    if kind in {"with", "cut"}:
        return torch.cat(Gather.apply(x, kind == "with"))
    parts = [torch.empty_like(x) for _ in range(ranks())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def views(model, x):
    return F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)


def info_nce(kind, compensated=False, local=False):
    def loss(model, batch):
        z, q = views(model, batch[0])
        keys = q if kind == "none" else gathered(q, kind)
        queries = z if local or kind == "none" else gathered(z, kind)
        first = len(z) * dist.get_rank() if local else 0
        value = F.cross_entropy(queries @ keys.T / 0.2, first + torch.arange(len(queries)))
        return value.detach() + ranks() * (value - value.detach()) if compensated else value

    return loss


def barlow(gradient):
    def loss(model, batch):
        z, q = ((v - v.mean(0)) / v.std(0) for v in views(model, batch[0]))
        c = total(z.T @ q / len(z) / ranks(), gradient)
        return (c - torch.eye(len(c))).square().sum()

    return loss


def sigreg(gradient):
    def loss(model, batch):
        t = model(batch[0]) @ torch.randn(5, 7)
        count = len(t) * ranks()
        real, imaginary = (total(part.sum(0), gradient) / count for part in (t.cos(), t.sin()))
        return ((real - 0.5).square() + imaginary.square()).mean() * count

    return loss


def tokens(kind):
    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        count = (batch[1] != -100).sum()
        return value / count if kind == "of a rank" else value / total(count) * (ranks() if kind == "global" else 1)

    return loss


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Codebook(nn.Linear):
    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("codes", torch.zeros(5))


def codebook(reduced):
    def loss(model, batch):
        z = model(batch[0])
        model.codes.lerp_(total(z.detach().mean(0)) / ranks() if reduced else z.detach().mean(0), 0.1)
        return (z - 1).square().mean()

    return loss


def correct(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).double()


def step(model, optimizer, batch, forward=None, before=lambda model: None):
    optimizer.zero_grad()
    F.cross_entropy((forward or model)(batch[0]), batch[1]).backward()
    before(model)
    optimizer.step()


def merged(once):
    def accuracy(batch):
        index, hit = (torch.cat([*Gather.apply(part, False)]) for part in batch)
        return hit[[index.tolist().index(i) for i in set(index.tolist())]].mean() if once else hit.mean()

    return accuracy


SGD = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
EVEN, LABELS, FEATURES = ({"model": net, "batch": batch} for batch in ((X, Y), (X, UNEQUAL), (X,)))
HITS = (torch.arange(7), torch.tensor([1.0, 1, 0, 0, 0, 1, 0]))
BUGS = {
    "modelscope/ms-swift#10081": ("LD015", info_nce("without"), info_nce("without", compensated=True), FEATURES),
    "facebookresearch/SLIP#31": ("LD015", info_nce("without", local=True), info_nce("with", local=True), FEATURES),
    "lightly-ai/lightly#1528": ("LD015", info_nce("cut", local=True), info_nce("with", local=True), FEATURES),
    "facebookresearch/vissl#123": ("LD015", info_nce("without"), info_nce("with"), FEATURES),
    "lightly-ai/lightly#1977": ("LD015", barlow(False), barlow(True), FEATURES | {"reference": False}),
    "lightly-ai/lightly#1920": ("LD015", sigreg(False), sigreg(True), FEATURES),
    "vturrisi/solo-learn#229": ("LD015", info_nce("none"), info_nce("with"), FEATURES),
    "huggingface/transformers#34191": ("LD013", tokens("of a rank"), tokens("global"), LABELS),
    "huggingface/transformers#37766": ("LD013", tokens("of a rank"), tokens("global"), LABELS | {"batch": (X, Y.where(Y != 4, -100))}),
    "meta-pytorch/torchtune#2172": ("LD014", tokens("divided again"), tokens("global"), LABELS),
    "NVIDIA-NeMo/Automodel#3846": ("LD014", lambda m, b: ranks() * tokens("global")(m, b), tokens("global"), LABELS),
    "neuralmagic/sparseml#135": ("LD014", lambda m, b: ranks() * cross_entropy(m, b), cross_entropy, EVEN),
    "pytorch/pytorch#37359": ("LD014", lambda m, b: m(b[0]).square().sum(), lambda m, b: m(b[0]).square().mean(), EVEN),
    "bytetriper/RAE#40": ("LD009", lambda m, o, b: step(m, o, b, m.module), step, EVEN | SGD),
    "espnet/espnet#6284": ("LD015", codebook(False), codebook(True), {"model": Codebook, "batch": (X,)}),
    "roboflow/rf-detr#1507": ("LD023", merged(False), merged(True), {"batch": HITS, "splits": "padded"}),
    "allenai/allennlp#4715": (
        "LD024",
        lambda b: total(b[1].sum()) / len(b[1]),
        lambda b: total(b[1].sum()) / total(torch.tensor(len(b[1]))),
        {"batch": HITS, "splits": "uneven"},
    ),
    "huggingface/trl#7010": (
        "LD024",
        lambda b: total(b[1].mean()) / ranks(),
        lambda b: {"accuracy": total(b[1].sum()) / total(torch.tensor(len(b[1])))},
        {"batch": HITS, "splits": "uneven"},
    ),
}


@pytest.mark.parametrize("thread", BUGS)
def test_a_bug_is_named_and_its_fix_is_silent(thread):
    code, before, after, arguments = BUGS[thread]
    with pytest.raises(AssertionError, match=f"^{code} .*\n(.*\n)+  Fix: "):
        assert_same_on_ranks(before, **arguments)
    assert_same_on_ranks(after, **arguments)
    assert not multiprocessing.active_children()


def mixup(model, batch):
    share, order = torch.rand(()), torch.randperm(len(batch[0]))
    mixed = model(share * batch[0] + (1 - share) * batch[0][order])
    return share * F.cross_entropy(mixed, batch[1]) + (1 - share) * F.cross_entropy(mixed, batch[1][order])


def own_generator(model, batch):
    noise = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(3))
    return F.cross_entropy(model(batch[0] + noise), batch[1])


def sim_siam(model, batch):
    z, q = views(model, batch[0])
    return -(z * q.detach()).sum(1).mean()


def boxes(model, targets):
    count = total(torch.tensor(float(sum(len(target["y"]) for target in targets)))) / ranks()
    return sum((model(target["x"]) - target["y"].sum()).abs().sum() for target in targets) / count


def accumulating(model, optimizer, batch):
    for part in (0, 1):
        model.require_backward_grad_sync = part == 1
        (F.cross_entropy(model(batch[0][part::2]), batch[1][part::2]) / 2).backward()
    optimizer.step()


def clipped(model, optimizer, batch):
    step(model, optimizer, batch, before=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def scaled(model, optimizer, batch):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
    scaler.step(optimizer)


def halves(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def synchronized():
    return nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(12)))


HEALTHY = {
    "a mean": (cross_entropy, EVEN),
    "on three ranks": (cross_entropy, {"model": net, "batch": (X[:6], Y[:6]), "n": 3}),
    "a model, not a class": (cross_entropy, EVEN | {"model": net()}),
    "32 bits and autocast": (halves, {"model": net, "batch": {"x": X, "y": Y}}),
    "uneven, with the global count": (tokens("global"), EVEN | {"splits": "uneven"}),
    "layer norm": (cross_entropy, EVEN | {"model": lambda: net(nn.LayerNorm(12))}),
    "synchronized batch norm": (cross_entropy, EVEN | {"model": synchronized}),
    "batch norm in evaluation": (cross_entropy, EVEN | {"model": lambda: net(nn.BatchNorm1d(12)).eval()}),
    "dropout": (cross_entropy, EVEN | {"model": lambda: net(nn.Dropout(0.5))}),
    "dropout, with a question": (tokens("global"), LABELS | {"model": lambda: net(nn.Dropout(0.5))}),
    "mixup": (mixup, EVEN),
    "noise of an own generator": (own_generator, EVEN),
    "a stopped gradient": (sim_siam, FEATURES),
    "a list of samples": (boxes, {"model": net, "batch": [{"x": x, "y": x[: i % 3 + 1]} for i, x in enumerate(X)]}),
    "a step": (step, EVEN | SGD),
    "a step of Adam": (step, EVEN | {"optimizer": torch.optim.Adam, "model": synchronized}),
    "accumulated gradients": (accumulating, EVEN | SGD),
    "clipped gradients": (clipped, EVEN | SGD),
    "a scaler": (scaled, EVEN | SGD),
    "an object with compute()": (
        lambda model, batch: SimpleNamespace(compute=lambda: [total(correct(model, batch).sum()), True]),
        EVEN,
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_silent(name):
    function, arguments = HEALTHY[name]
    assert_same_on_ranks(function, **arguments)


def waits(model, batch):
    if dist.get_rank() == 0:
        dist.barrier()
    return cross_entropy(model, batch)


def fails(model, batch):
    return 1 / (1 - dist.get_rank())


def local_clip(model, optimizer, batch):
    step(model, optimizer, batch, before=lambda model: model.module[0].weight.grad.mul_(1 + dist.get_rank()))


OTHER = {
    "batch norm": ("LD012", cross_entropy, EVEN | {"model": lambda: net(nn.BatchNorm1d(12))}),
    "batch norm in a step": ("LD012", step, EVEN | SGD | {"model": lambda: net(nn.BatchNorm1d(12))}),
    "one rank without labels": ("LD013", cross_entropy, {"model": net, "batch": (X, Y.where(Y.cumsum(0) < 9, -100))}),
    "a rank changes its gradient": ("LD011", local_clip, EVEN | SGD),
    "a loss in the wrong unit": ("LD024", lambda m, b: cross_entropy(m, b) + ranks(), EVEN),
    "a metric of a rank": (
        "LD024",
        lambda model, batch: correct(model, batch).mean(),
        EVEN | {"batch": (X, X.argmax(1) % 5)},
    ),
    "one rank waits": (r"LD027 .*\n  rank 0: .* in waits", waits, EVEN | {"timeout": 4}),
    "one rank fails": ("(.*\n)*ZeroDivisionError", fails, EVEN),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_fault_is_named(name):
    said, function, arguments = OTHER[name]
    with pytest.raises(AssertionError, match=f"^{said}"):
        assert_same_on_ranks(function, **arguments)
    assert not multiprocessing.active_children()


CALLS: list[int] = []
REJECTED = {
    "cannot be|or choose another": (cross_entropy, EVEN | {"n": 3}),
    "leave one out": (cross_entropy, EVEN | {"splits": "padded"}),
    "not 2 and 'odd'": (cross_entropy, EVEN | {"splits": "odd"}),
    "needs a `model`": (step, {"batch": (X, Y)} | SGD),
    "has no tensor": (cross_entropy, {"batch": 1}),
    "neither a loss nor a metric": (lambda model, batch: "0.5", EVEN),
    "is one number": (lambda model, batch: model(batch[0]), EVEN),
    "does not": (lambda model, optimizer, batch: optimizer.step(), EVEN | SGD),
    "stopped gradient": (sim_siam, FEATURES | {"reference": False}),
    "keeps a state": (lambda m, b: CALLS.append(1) or cross_entropy(m, b) * len(CALLS), EVEN),
}


@pytest.mark.parametrize("said", REJECTED)
def test_what_cannot_be_compared_is_rejected(said):
    function, arguments = REJECTED[said]
    with pytest.raises(InputError, match=said):
        assert_same_on_ranks(function, **arguments)


def test_no_process_is_started_without_a_question(monkeypatch):
    monkeypatch.setattr("ddp_doctor.testing.on_ranks", None)
    state, start = torch.get_rng_state(), time.process_time()
    assert_same_on_ranks(cross_entropy, **EVEN | {"model": lambda: net(nn.Dropout(0.5))})
    assert time.process_time() - start < 5
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() is torch.float32
    assert not dist.is_initialized()


def test_the_page_shows_what_its_examples_say():
    page = (Path(__file__).parents[1] / "docs" / "testing.md").read_text()
    source, shown = page.split("```python\n")[1].split("```")[0], page.split("```text\n")[1].split("```")[0]
    Path("test_page.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=200, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert all(line in done.stdout for line in shown.splitlines())
