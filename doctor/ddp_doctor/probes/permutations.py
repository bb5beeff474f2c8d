"""Probe of random permutations that a program draws and divides itself, without a sampler."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import Recorder, is_called_by_user, user_place
from ddp_doctor.records.spec import Spec

_MOST, _LONGEST = 20, 100_000


class PermutationProbe:
    """Records the part of each permutation of `torch.randperm` that a rank takes first, and the permutation then."""

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._divided: set[int] = set()

    def install(self) -> None:
        """Installs the probe in the ranks of a run."""
        if self.spec.purpose == "train" and self.spec.world_size > 1:
            wrap(torch, "randperm", self._on_permutation)

    def _on_permutation(self, original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        permutation = original(*args, **kwargs)
        if len(self._known) < _MOST and len(permutation) <= _LONGEST and is_called_by_user():
            if not self._known:
                wrap(torch.Tensor, "__getitem__", self._on_index)
            self._known.append(weakref.ref(permutation))
        return permutation

    def _on_index(self, original: Callable[..., Any], tensor: torch.Tensor, index: Any) -> Any:
        if type(index) is slice:
            number = next((number for number, known in enumerate(self._known) if known() is tensor), None)
            if number is not None and number not in self._divided:
                self._divided.add(number)
                # A program may have made the permutations of the ranks equal since it was drawn.
                self.recorder.tensors[f"permutation/{number}"] = tensor.detach().cpu().clone()
                part = list(index.indices(len(tensor)))
                self.recorder.add("part of a permutation", number=number, part=part, place=user_place())
        return original(tensor, index)
