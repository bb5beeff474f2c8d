"""The six points of raw DDP's checklist: the naive line in place of each marked one changes the training or its counts.

A naive line is what a training on one device would say there, or a usual mistake. Such an engine still runs to its
end. What it then trains, sends, writes or counts is compared with the unchanged file, which does the same each time.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Program, largest_difference, weights_of

from lit_mnist.checkpoint.store import CheckpointFolder
from lit_mnist.engines import raw_ddp
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.evaluation_loop import EvaluationSums

SOURCE = Path(raw_ddp.__file__).read_text()
LINES = SOURCE.splitlines()
# The numbers of the marked lines, from 1, and their marks.
MARKED = {number: match[1] for number, line in enumerate(LINES, start=1) if (match := re.search(r"# (\(\d\))$", line))}

# Two epochs of 13 micro-batches, two to a step: the seventh step of an epoch has one only. The ranks' shares of both
# evaluations are uneven. No gradient is clipped, unless it is still multiplied by the scale of float16.
PER_EPOCH, VALIDATED, TESTED = 7, 9, 21
FLAGS: tuple[object, ...] = (
    *("--devices", 2, "--trainer.accumulate_grad_batches", 2, "--lr", 0.01, "--trainer.gradient_clip_val", 1000),
    *("--batch-size", 8, "--data.train_size", 104, "--data.val_size", VALIDATED, "--data.test_size", TESTED),
    *("--epochs", 2, "--data.augment", "none", "--run.threads", 1, "--run.trace", "traffic"),
)
FLOAT32, FLOAT16 = "32-true", "16-mixed"

INITIAL = build_net(ModelSettings(), num_classes=10, seed=42).state_dict()
STATISTICS = {name for name in INITIAL if name.endswith(("running_mean", "running_var"))}
LEARNED = {name for name in INITIAL if name.endswith(("weight", "bias"))}
# Batch norm subtracts the bias of the convolution before it: its gradient is rounding, which may be equal on two ranks.
SUBTRACTED = {"layer1.0.bias", "layer2.0.bias"}


@dataclass(frozen=True)
class Observed:
    """What is seen of a run from outside.

    Attributes:
        samples: A digest of each step's images, for each rank.
        digests: The digests of all weights and buffers after each step, for each rank.
        collectives: A step's collectives by name, for each rank.
        weights: Rank 0's weights and buffers at the end.
        validation: The last evaluation on the validation split.
        test: The evaluation on the test split.
        steps: Optimizer steps, and those that the scaler skipped.
        writers: How many checkpoints each rank wrote.
        groups_left: Whether each rank was still in a process group after the run.
    """

    samples: list[list[str]]
    digests: list[list[dict[str, str]]]
    collectives: list[dict[str, float]]
    weights: dict[str, torch.Tensor] = field(compare=False)
    validation: dict[str, Any]
    test: dict[str, Any]
    steps: tuple[int, int]
    writers: dict[str, int]
    groups_left: list[bool]

    @property
    def counts(self) -> tuple[int, ...]:
        """The samples of both evaluations, as reported and as in the confusion matrix."""
        both = (self.validation, self.test)
        return tuple(count for part in both for count in (part["count"], sum(map(sum, part["confusion"]))))

    @property
    def apart(self) -> list[set[str]]:
        """The weights and buffers in which the two ranks differ, after each step."""
        pairs = zip(*self.digests, strict=True)
        return [{name for name in first if first[name] != second[name]} for first, second in pairs]

    @property
    def moved(self) -> float:
        """The farthest that the training has moved a weight."""
        initial = {name: INITIAL[name] for name in LEARNED}
        return largest_difference(initial, {name: self.weights[f"net.{name}"] for name in LEARNED})

    def changed_at(self, control: Observed) -> int | None:
        """Returns the first step, from 1, after which rank 0 has other weights than in the control."""
        pairs = enumerate(zip(self.digests[0], control.digests[0], strict=True), start=1)
        return next((step for step, (found, expected) in pairs if found != expected), None)


class UncheckedSums(EvaluationSums):
    """Returns what was counted, without the project's own check that it is the whole split."""

    def compute(self, expected: int | None) -> Evaluation:
        return super().compute(int(self.sums[1]))


def engine_of(source: str) -> Callable[..., None]:
    """Returns the `run` of an engine's source."""
    names: dict[str, Any] = {"__name__": raw_ddp.__name__}
    exec(compile(source, raw_ddp.__file__, "exec"), names)  # noqa: S102
    assert names["EvaluationSums"] is EvaluationSums
    names["EvaluationSums"] = UncheckedSums
    return names["run"]  # type: ignore[no-any-return]


def observed(program: Program, source: str, precision: str) -> Observed:
    """Trains by an engine's source, in float16 from a scale that overflows at first; the run must end well."""
    engine, notes = engine_of(source), program.folder / "notes"
    put, scaler = CheckpointFolder.put, torch.amp.GradScaler.__init__

    def noted(self: CheckpointFolder, *args: Any, **kwargs: Any) -> None:
        with (notes / "writers").open("a") as file:
            file.write(f"{os.environ['RANK']}\n")
        # The files are rank 0's: ranks that replace each other's may end in an error, or may not.
        if os.environ["RANK"] == "0":
            put(self, *args, **kwargs)

    def large(self: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
        scaler(self, *args, **{**kwargs, "init_scale": 2.0**20})  # type: ignore[arg-type]

    def watched(job: Any, rank: Any) -> None:
        engine(job, rank)
        (notes / f"left-{rank.rank}").write_text(str(torch.distributed.is_initialized()))

    notes.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CheckpointFolder, "put", noted)
        monkeypatch.setattr(torch.amp.GradScaler, "__init__", large)
        monkeypatch.setattr(raw_ddp, "run", watched)
        folder = program.train(*FLAGS, "--precision", precision, engine="raw_ddp", timeout=60)
    # A naive line may give metrics that are impossible, which the schema rejects.
    result = json.loads((folder / "result.json").read_text())
    traces = [json.loads((folder / "trace" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    return Observed(
        samples=[[step["samples"] for step in trace["steps"]] for trace in traces],
        digests=[[step["weights"] for step in trace["steps"]] for trace in traces],
        collectives=[trace["traffic"]["collectives"] for trace in traces],
        weights=weights_of(folder),
        validation=result["validation"],
        test=result["test"],
        steps=(result["steps"], result["skipped_steps"]),
        writers=dict(Counter((notes / "writers").read_text().split())),
        groups_left=[(notes / f"left-{rank}").read_text() == "True" for rank in (0, 1)],
    )


def statements() -> list[tuple[str, range]]:
    """Returns the marked statements: their mark, and the lines, from 0, that a naive one replaces.

    Of a `with` or an `if` these are its head.
    """
    found = []
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.stmt) and node.lineno in MARKED:
            last = node.body[0].lineno - 1 if isinstance(node, ast.With | ast.If) else node.end_lineno
            assert last is not None
            found.append((MARKED[node.lineno], range(node.lineno - 1, last)))
    return found


def marked_lines(mark: str, code: str) -> range:
    """Returns the lines of the one statement that has a mark and contains some code; without it the test fails."""
    found = [lines for its, lines in statements() if its == mark and code in "\n".join(LINES[lines.start : lines.stop])]
    if len(found) != 1:
        pytest.fail(f"{len(found)} statements of raw_ddp.py are marked {mark} and contain {code!r}, but one must.")
    return found[0]


class Naive(NamedTuple):
    """A naive line.

    Attributes:
        mark: The number of its point, as the file marks it.
        code: Part of the statement that it replaces.
        line: The line.
        check: Asserts what it changes, given what is observed with it and without it.
        precision: What is trained with.
    """

    mark: str
    code: str
    line: str
    check: Callable[[Observed, Observed], None]
    precision: str = FLOAT32

    @property
    def source(self) -> str:
        """The engine's source with the naive line."""
        lines = marked_lines(self.mark, self.code)
        indent = LINES[lines.start].removesuffix(LINES[lines.start].lstrip())
        return "\n".join([*LINES[: lines.start], indent + self.line, *LINES[lines.stop :]])


def trains_alone(naive: Observed, control: Observed) -> None:
    """The ranks' weights are never the same, and rank 0 counts its own part of each evaluation."""
    assert all(names | SUBTRACTED == LEARNED | STATISTICS for names in naive.apart)
    assert naive.counts == (VALIDATED // 2, VALIDATED // 2, TESTED // 2, TESTED // 2)
    assert naive.samples == control.samples


def leaves_the_group_open(naive: Observed, control: Observed) -> None:
    assert replace(naive, groups_left=[False, False]) == control
    assert naive.groups_left == [True, True]


def normalises_by_own_samples(naive: Observed, control: Observed) -> None:
    """Other weights from the first step on, and each rank with statistics of its own."""
    assert naive.changed_at(control) == 1
    assert all(names == STATISTICS for names in naive.apart)
    assert naive.samples == control.samples


def shares_no_gradient(naive: Observed, control: Observed) -> None:
    """The ranks drift apart in every weight; only batch norm's statistics are shared still."""
    assert all(names | SUBTRACTED == LEARNED for names in naive.apart)
    assert "all_reduce" in control.collectives[0]
    assert "all_reduce" not in naive.collectives[0]
    assert naive.samples == control.samples


def trains_half_of_the_samples(naive: Observed, control: Observed) -> None:
    """Both ranks see rank 0's images, so nobody sees the others, and the weights are others."""
    assert naive.samples == [control.samples[0]] * 2
    assert control.samples[0] != control.samples[1]
    assert naive.changed_at(control) == 1


def repeats_the_first_epoch(naive: Observed, control: Observed) -> None:
    for rank in (0, 1):
        first, second = naive.samples[rank][:PER_EPOCH], naive.samples[rank][PER_EPOCH:]
        assert first == second == control.samples[rank][:PER_EPOCH]
        assert not set(first) & set(control.samples[rank][PER_EPOCH:])
    assert naive.changed_at(control) == PER_EPOCH + 1


def sends_every_micro_batch(naive: Observed, control: Observed) -> None:
    """Twice the collectives, and the same training but for rounding."""
    for before, after in zip(control.collectives, naive.collectives, strict=True):
        assert after["all_reduce"] == 2 * before["all_reduce"]
        assert after["exchange"] == before["exchange"]
    assert naive.samples == control.samples
    assert largest_difference(naive.weights, control.weights) < 1e-3


def adds_the_losses_up(naive: Observed, control: Observed) -> None:
    """The sum of two micro-batches' gradients, not their mean: the weights go about twice as far."""
    assert naive.changed_at(control) == 1
    assert naive.moved > 1.5 * control.moved
    assert naive.samples == control.samples


def halves_the_last_step(naive: Observed, control: Observed) -> None:
    """The epoch's last step has one micro-batch, whose gradient is not to be halved."""
    assert naive.changed_at(control) == PER_EPOCH
    assert naive.samples == control.samples


def stands_still(naive: Observed, control: Observed) -> None:
    """The gradient is divided by a scale by which the loss was not multiplied."""
    assert naive.steps == (control.steps[0], 0)
    assert naive.moved < control.moved / 1000


def clips_the_scale(naive: Observed, control: Observed) -> None:
    """The norm to clip is that of the gradient times the scale, so that hardly anything is left of it."""
    assert naive.moved < control.moved / 10


def skips_every_step(naive: Observed, control: Observed) -> None:
    """The scale stays as large as it was, and no step is made."""
    assert naive.steps == (control.steps[0], control.steps[0])
    assert naive.moved == 0


def writes_twice(naive: Observed, control: Observed) -> None:
    assert naive.writers == {"0": control.writers["0"], "1": control.writers["0"]}
    assert replace(naive, writers=control.writers) == control


def counts_one_rank_s_classes(naive: Observed, control: Observed) -> None:
    assert naive.counts == (VALIDATED, VALIDATED // 2, TESTED, TESTED // 2)
    assert naive.digests == control.digests


def sums_one_rank_s_losses(naive: Observed, control: Observed) -> None:
    assert naive.counts == (VALIDATED // 2, VALIDATED, TESTED // 2, TESTED)
    assert naive.test["loss"] < control.test["loss"] * 0.8
    assert naive.test["confusion"] == control.test["confusion"]
    assert naive.digests == control.digests


ALONE = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
NAIVE = {
    "each rank joins a group of its own": Naive("(1)", "init_process_group(", ALONE, trains_alone),
    "no rank leaves its group": Naive("(1)", "destroy_process_group(", "pass", leaves_the_group_open),
    "batch norm sees one rank's samples": Naive("(2)", "sync_batch_norm(", "pass", normalises_by_own_samples),
    "the network is not wrapped": Naive(
        "(2)", "DistributedDataParallel(", "model = net; model.no_sync = nullcontext", shares_no_gradient
    ),
    "every rank takes rank 0's batches": Naive(
        "(3)",
        "partial(",
        "train_batches = partial(job.train_batches, type(rank)(world_size=rank.world_size))",
        trains_half_of_the_samples,
    ),
    "the order does not change with the epoch": Naive(
        "(3)", "train_batches(epoch", "batches = train_batches(0, state.step)", repeats_the_first_epoch
    ),
    "gradients travel with every micro-batch": Naive(
        "(4)", "no_sync()", "with nullcontext():", sends_every_micro_batch
    ),
    "the loss is not divided": Naive("(4)", "share =", "share = loss", adds_the_losses_up),
    "every window is divided as a full one": Naive(
        "(4)", "share =", "share = loss / plan.accumulate", halves_the_last_step
    ),
    "an unscaled loss goes backward": Naive(
        "(4)", "scaler.scale(", "scaler.scale(share); share.backward()", stands_still, FLOAT16
    ),
    "scaled gradients are clipped": Naive("(4)", "scaler.unscale_(", "pass", clips_the_scale, FLOAT16),
    "the scale never changes": Naive(
        "(4)", "scaler.update(", "scaler.update(scaler.get_scale())", skips_every_step, FLOAT16
    ),
    "every rank writes": Naive("(5)", "rank.is_first", "if True:", writes_twice),
    "the classes of one rank are counted": Naive("(6)", "sums.confusion", "pass", counts_one_rank_s_classes),
    "the losses of one rank are summed": Naive("(6)", "sums.sums", "pass", sums_one_rank_s_losses),
}


Control = Callable[[str], Observed]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Control:
    """What is observed of the unchanged file with a precision; it trains once."""

    @cache
    def of(precision: str) -> Observed:
        return observed(Program(tmp_path_factory.mktemp("control")), SOURCE, precision)

    return of


@pytest.mark.parametrize("precision", [FLOAT32, pytest.param(FLOAT16, marks=pytest.mark.slow)])
def test_the_unchanged_file_does_the_same_each_time(program: Program, control: Control, precision: str) -> None:
    first, second = control(precision), observed(program, SOURCE, precision)
    assert first == second
    assert not any(first.apart)
    assert first.counts == (VALIDATED, VALIDATED, TESTED, TESTED)
    assert first.writers.keys() == {"0"}
    assert first.groups_left == [False, False]
    steps, skipped = first.steps
    assert steps == 2 * PER_EPOCH
    assert 0 < skipped < steps if precision == FLOAT16 else skipped == 0


def test_every_marked_line_has_a_naive_one() -> None:
    assert sorted(set(MARKED.values())) == [f"({number})" for number in range(1, 7)]
    replaced = {marked_lines(naive.mark, naive.code) for naive in NAIVE.values()}
    assert replaced == {lines for _, lines in statements()}
    assert len(replaced) == len(MARKED)


@pytest.mark.parametrize(("mark", "code"), [("(4)", "no such code"), ("(1)", "scaler.update("), ("(6)", "all_reduce")])
def test_a_naive_line_that_does_not_fit_the_file_fails(mark: str, code: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"\d statements of raw_ddp.py are marked"):
        marked_lines(mark, code)


# make soak tries every line, and make test one or two of each mark.
QUICK = {
    "each rank joins a group of its own",
    "batch norm sees one rank's samples",
    "the network is not wrapped",
    "every rank takes rank 0's batches",
    "the order does not change with the epoch",
    "the loss is not divided",
    "scaled gradients are clipped",
    "every rank writes",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in NAIVE]
)
def test_a_naive_line_changes_the_training_or_its_counts(program: Program, control: Control, case: str) -> None:
    naive = NAIVE[case]
    seen, expected = observed(program, naive.source, naive.precision), control(naive.precision)
    assert seen != expected
    naive.check(seen, expected)
