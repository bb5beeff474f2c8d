"""The data sets of a program: what direct calls of them give."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from ddp_doctor.probes.generators import OWN, OwnGenerators, generators, seed_unseen
from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import tree_leaves

# Samples of a data set that are called directly, and the seconds that this may take.
_MOST_CALLS = 64
_MOST_SECONDS = 1.0
# The values of a data set that are recorded: those of all samples, and the first ones of each of their leaves.
_MOST_ROWS, _MOST_VALUES = 8192, 16


class Datasets:
    """Calls the data sets that the loaders of a program have.

    Attributes:
        found: The data sets below all Subsets, in the order of first use.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.found: list[Any] = []

    def number(self, dataset: Any) -> int:
        """Returns the number of the data set below all Subsets, in the order of first use."""
        base = below_subsets(dataset)
        for number, other in enumerate(self.found):
            if other is base:
                return number
        self.found.append(base)
        return len(self.found) - 1

    def call(self) -> None:
        """Calls the data sets directly: which sample an index means, and whether it is random."""
        if self.spec.purpose != "train" or self.spec.interventions:
            return
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        for number, dataset in enumerate(self.found):
            # A data set of the user may raise anything.
            with suppress(Exception):
                self._call(number, dataset)
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)

    def _call(self, number: int, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not len(dataset):
            return
        size, begun = len(dataset), time.monotonic()
        wanted = sorted({place * (size - 1) // (_MOST_CALLS - 1) for place in range(_MOST_CALLS)})
        seen: dict[str, list[str]] = {}
        random_samples, used = 0, set[str]()
        own = OwnGenerators()
        own.find()
        for index in wanted:
            calls = []
            # With one pair of seeds for all, a rotation drawn from four would always differ, or never.
            for seed in (2 * index, 2 * index, 2 * index + 1):
                seed_unseen(seed)
                before, before_own = generators(), own.states()
                calls.append([_leaf_digest(leaf) for leaf in tree_leaves(dataset[index])])
                used |= {name for name, state in generators().items() if state != before[name]}
                used |= {OWN} if own.states() != before_own else set()
            # A value that the same seed does not repeat says nothing about the sample.
            seen[str(index)] = [one if one == same else "" for one, same in zip(calls[0], calls[1], strict=False)]
            random_samples += calls[0] != calls[2]
            if time.monotonic() > begun + _MOST_SECONDS:
                break
        self.recorder.add(
            "calls",
            base=number,
            dataset=type(dataset).__name__,
            samples=seen,
            random=random_samples / len(seen),
            generators=sorted(used),
        )
        if not random_samples and len(dataset) <= _MOST_ROWS:
            self._keep_rows(number, dataset)

    def _keep_rows(self, number: int, dataset: Any) -> None:
        """Records the first values of all samples, if they are not random."""
        rows, begun = [], time.monotonic()
        for index in range(len(dataset)):
            seed_unseen(index)
            rows.append([_values(leaf) for leaf in tree_leaves(dataset[index])])
            if time.monotonic() > begun + _MOST_SECONDS:
                return
        self.recorder.add("rows", base=number, dataset=type(dataset).__name__, rows=rows)


def below_subsets(dataset: Any) -> Any:
    """Returns the data set below all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _leaf_digest(leaf: Any) -> str:
    content = getattr(leaf, "tobytes", None)
    return digest(leaf) if isinstance(leaf, torch.Tensor) or content is None else digest(str(content()))


def _values(leaf: Any) -> list[int] | list[float]:
    """Returns the first values of a tensor, an array or a number; nothing of what is no number."""
    with suppress(TypeError, ValueError, RuntimeError):
        found = torch.as_tensor(leaf).flatten()[:_MOST_VALUES]
        return [] if found.is_complex() else found.tolist()
    return []
