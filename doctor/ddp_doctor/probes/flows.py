"""Where random draws go: into the samples and inputs of a step, or into the activations of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ddp_doctor.records.recorder import user_place
from ddp_doctor.torch_internals import in_backward, tree_leaves

_MOST_DRAWS = 50
# These operators take the shape of a tensor, not its values.
_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full")
_DROPS = ("dropout", "rrelu", "scaled_dot_product", "lstm", "gru", "rnn_")
Draw = dict[str, Any]


class DrawFlow:
    """Follows draws to the first data, parameters or activations that they meet.

    A draw that is combined with the batch, or that enters the model beside its parameters, decides which data the model
    sees. A draw that meets activations, such as a dropout mask, does not.

    Attributes:
        draws: The draws of this step: operator, number of values, `into` (`data`, `model`, or empty if it met neither),
            whether it drops values, and the user's place.
    """

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._begin()

    def begin(self, batch: Any) -> None:
        """Begins a step with a batch."""
        self.draws = []
        self._begin()
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self._data[leaf] = True

    def see(self, name: str, args: Any, kwargs: Any, outputs: Iterable[torch.Tensor], drew: bool) -> None:
        """Takes an operator that was run.

        Args:
            name: Its name, such as `aten::add`.
            args: Its arguments.
            kwargs: Its further arguments.
            outputs: The tensors that it returned.
            drew: Whether it drew from torch's global generator.
        """
        if in_backward():
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if drew or name.endswith(_SHAPE_ONLY):
            inputs = [] if name.endswith((*_SHAPE_ONLY, "_")) else inputs
        sources = [draw for tensor in inputs for draw in self._sources.get(tensor, ())]
        others = [tensor for tensor in inputs if tensor not in self._sources]
        met = any(tensor in self._activations for tensor in others)
        data = any(tensor in self._data for tensor in others)
        for draw in sources:
            if draw["drops"]:
                continue
            if met:
                draw["into"] = draw["into"] or "model"
            elif data or any(tensor.requires_grad for tensor in others):
                draw["into"] = "data"
        if name == "aten::div_" and sources and sources[0]["op"] == "bernoulli_":
            # Dropout that is made of a mask, divided by the share that is kept.
            sources[0] |= {"into": "model", "drops": True}
        if drew and len(self.draws) < _MOST_DRAWS:
            sources = [*sources, self._drawn(name, args, outputs, met)]
        self._mark(inputs, outputs, sources, met, data)

    def found(self) -> list[Draw]:
        """Returns the draws of more than one value, which differ between samples."""
        return [draw for draw in self.draws if draw["values"] > 1]

    def _drawn(self, name: str, args: Any, outputs: Iterable[torch.Tensor], met: bool) -> Draw:
        drops = any(part in name for part in _DROPS)
        draw: Draw = {
            "drops": drops,
            "op": name.partition("::")[2],
            "values": max((out.numel() for out in outputs), default=0),
            "into": "model" if drops or met else "",
            "place": user_place(),
        }
        self.draws.append(draw)
        return draw

    def _mark(
        self, inputs: list[torch.Tensor], outputs: Iterable[torch.Tensor], sources: list[Draw], met: bool, data: bool
    ) -> None:
        trained = [tensor.requires_grad for tensor in inputs]
        activation = met or (any(trained) and not all(trained))
        for out in outputs:
            if activation:
                self._activations[out] = True
            elif sources:
                self._sources[out] = sources
            elif data:
                self._data[out] = True

    def _begin(self) -> None:
        # A tensor is compared by its identity.
        self._sources: Any = WeakIdKeyDictionary()
        self._data: Any = WeakIdKeyDictionary()
        self._activations: Any = WeakIdKeyDictionary()
