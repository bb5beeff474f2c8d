"""What each rank may own, and what must be equal on all ranks, on recorded events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_checks import Event, event, evidence, reason, records, verdicts
from test_states import STEP, epoch
from torch.utils.data import Dataset, Subset, TensorDataset

from ddp_doctor.evidence.communication import averaged_weights, own_models, shards
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import repeated_samples
from ddp_doctor.faults.ld015_loss_sees_one_rank import _buffer_of_each_rank
from ddp_doctor.probes.samples import _selection

KEYS = {"0:0": "weight", "0:1": "bias"}


def step(number: int = 0, **values: Any) -> Event:
    return event("step", number, **{**STEP, "names": KEYS, **values})


def trained(*ranks: list[Event], gradients: str = "own", **tensors: list[torch.Tensor]) -> Evidence:
    """Returns two ranks, whose optimizers apply each rank's own gradient or the mean."""
    local = [torch.linspace(0, 1, 4), torch.linspace(2, 1, 4)]
    mean = (local[0] + local[1]) / 2
    recorded: list[dict[str, torch.Tensor]] = [{}, {}]
    for key in KEYS:
        for rank, values in enumerate(recorded):
            values[f"applied/0/{key}"] = local[rank] if gradients == "own" else mean
            values[f"before/0/{key}"] = torch.ones(4)
            if gradients != "unknown":
                values[f"local/0/{key}"] = local[rank]
            for name, each in tensors.items():
                values[f"{name}/0/{key}"] = each[rank]
    for number, events in enumerate(ranks):
        events.append(event("stepped", weights={key: str(number) for key in KEYS}))
    return evidence(ranks=records(*ranks, tensors=recorded))


@pytest.mark.parametrize(
    ("rates", "gradients", "files", "wrapped", "said"),
    [
        ((0.1, 0.3), "own", (), False, "another learning rate"),
        ((0.1, 0.1), "own", ("fold0.pt", "fold1.pt"), False, "a file of its own"),
        ((0.1, 0.1), "own", ("last.pt", "last.pt"), False, ""),
        ((0.1, 0.1), "own", (), False, ""),
        ((0.1, 0.3), "mean", (), False, ""),
        ((0.1, 0.3), "own", (), True, ""),
    ],
)
def test_a_model_of_each_rank_is_told_from_gradients_that_are_not_averaged(
    rates: tuple[float, float], gradients: str, files: tuple[str, ...], wrapped: bool, said: str
) -> None:
    ranks = [[step(lr=[rate]), event("collective", op="all_gather_object", size=0)] for rate in rates]
    for events, path in zip(ranks, files, strict=False):
        events += [event("save", path=path), event("saved", tensors=["a", "b"], weights=["c", "d"], keys=[])]
    for events in ranks if wrapped else ():
        events.append(event("ddp", module="Net", parameters=list(KEYS.values())))
    found = trained(*ranks, gradients=gradients)
    assert (said in own_models(found)) if said else not own_models(found)
    if said:
        assert verdicts("LD009", found) == ["note"]
        assert "model of its own" in reason("LD002", found)
    elif gradients == "own" and not wrapped:
        assert verdicts("LD009", found) == ["fault"]


@pytest.mark.parametrize(
    ("gradients", "differ", "slices"), [("unknown", True, True), ("unknown", False, False), ("own", True, False)]
)
def test_slices_of_the_parameters_are_no_parameters(gradients: str, differ: bool, slices: bool) -> None:
    before = [torch.zeros(4), torch.ones(4)] if differ else [torch.ones(4)] * 2
    assert shards(trained([step()], [step()], gradients=gradients, before=before)) is slices


@pytest.mark.parametrize("ignored", [True, False])
def test_a_parameter_that_ddp_is_told_to_ignore_may_differ(ignored: bool) -> None:
    ranks = [
        [
            event("ddp", module="Net", parameters=list(KEYS.values()), ignored=list(KEYS.values()) if ignored else []),
            event("ddp_forward", gradients=True, synchronizes=True, buffers=False, parameters=[]),
            step(),
        ]
        for _ in range(2)
    ]
    assert verdicts("LD010", trained(*ranks)) == ([] if ignored else ["fault"])


@pytest.mark.parametrize(
    ("times", "steps", "averaged"),
    # The sizes of the weights in each step are those of gradients; before the first one, those of the initial weights.
    [((4,), 8, True), ((4, 8), 8, True), (range(1, 8), 8, False), ((0,), 8, False), ((), 8, False)],
)
def test_averages_of_copies_are_seen_by_their_sizes(times: Any, steps: int, averaged: bool) -> None:
    ranks = []
    for _ in range(2):
        events = [step(number) for number in range(steps)]
        events += [event("collective", number, op="all_reduce", size=4) for number in times for _ in KEYS]
        ranks.append(events)
    assert bool(averaged_weights(trained(*ranks))) is averaged


@pytest.mark.parametrize("second", ["a", "b"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_buffer_that_each_rank_updates_is_named(second: str, broadcast: bool) -> None:
    ranks = [
        [
            step(),
            event("ddp_forward", gradients=True, synchronizes=True, buffers=broadcast, parameters=[]),
            event("forward", 1, module="Net", buffers={"mask": "m", "queue": value}),
        ]
        for value in ("a", second)
    ]
    assert _buffer_of_each_rank(trained(*ranks)) == (None if second == "a" else ("queue", broadcast))


@pytest.mark.parametrize(
    ("second", "faulty", "found"), [("b", False, ["fault"]), ("b", True, []), ("a", False, []), ("", False, [])]
)
def test_a_selection_that_a_sampler_divides_is_equal_on_all_ranks(second: str, faulty: bool, found: list[str]) -> None:
    ranks = [[event("collective", op="all_reduce"), step(), epoch(divided=value)] for value in ("a", second)]
    evaluated = [[*events[:2], epoch(), {**events[2], "trains": False}] for events in ranks]
    for events in (ranks, evaluated):
        given = evidence(ranks=records(*events))
        assert verdicts("LD005", replace(given, faulty=faulty)) == found


class View(Dataset[Any]):
    """A data set that changes the samples of another one."""

    def __init__(self, data: Dataset[Any], length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return self.length


def test_what_is_selected_below_a_data_set_that_changes_the_samples_is_known() -> None:
    first, second = (Subset(TensorDataset(torch.arange(8)), chosen) for chosen in ([0, 1, 2, 3], [4, 5, 6, 7]))
    assert _selection(first) == _selection(View(View(first, 4), 4)) != _selection(View(second, 4))
    # It may have other positions.
    assert _selection(View(first, 3)) == _selection(TensorDataset(torch.arange(8))) == ""


def test_ranks_with_other_selections_count_no_sample_twice() -> None:
    """The same position is another sample, so nothing says that samples were repeated to fill a batch."""
    events = [epoch(trains=False, indices=[0, 1], sizes=[2], drained=True, divided=value) for value in ("a", "a", "b")]
    assert repeated_samples([event | {"indices": [rank, 1]} for rank, event in enumerate(events[:2])]) == [1]
    assert repeated_samples([event | {"indices": [rank, 1]} for rank, event in enumerate(events[1:])]) == []


@pytest.mark.parametrize(("endless", "found"), [(True, []), (False, ["fault"])])
def test_an_endless_stream_may_have_unequal_numbers_of_batches(endless: bool, found: list[str]) -> None:
    ranks = [
        [
            event("collective", op="all_reduce"),
            step(),
            epoch(sizes=[2] * count, batches=count, yielded=count, endless=endless, place="train.py:3"),
        ]
        for count in (3, 2)
    ]
    assert verdicts("LD028", evidence(ranks=records(*ranks))) == found
