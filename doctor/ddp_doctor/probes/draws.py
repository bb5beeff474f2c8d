"""The random draws of each step: recorded, replaced by those of the ranks, and followed to where they go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ddp_doctor.probes.generators import OwnGenerators, states_of_global, values_drawn
from ddp_doctor.records.recorder import Recorder, user_place
from ddp_doctor.records.spec import OWN, Spec
from ddp_doctor.torch_internals import DispatchMode, in_backward, tree_leaves

if TYPE_CHECKING:
    from ddp_doctor.probes.micro_batches import RankBatches

# These operators take the shape of a tensor, not its values.
_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full")
_DROPS = ("dropout", "rrelu", "scaled_dot_product", "lstm", "gru", "rnn_")
# In inference mode, these operators draw as a whole, without the mark of those that draw.
_RECURRENT = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}


class DrawFlow:
    """Follows draws to the first data, parameters or activations that they meet.

    A draw that is combined with the batch, or that enters the model beside its parameters, decides which data the model
    sees. A draw that meets activations, such as a dropout mask, does not.

    Attributes:
        draws: The draws of this step that decide about data, with their operator and the user's place.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.draws: list[dict[str, Any]] = []
        self._recorder, self._follows = recorder, True
        self._mask: torch.Tensor | None = None
        # What a tensor is, by its identity: "data", "activation", or the draws that are in it.
        self._known: Any = WeakIdKeyDictionary()

    def begin(self, batch: Any, *, follows: bool = True) -> None:
        """Begins a step with a batch, or an evaluation, whose draws are not followed."""
        self._follows = follows
        self.draws, self._known = [], WeakIdKeyDictionary()
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self._known[leaf] = "data"

    def see(self, name: str, args: Any, kwargs: Any, outputs: Iterable[torch.Tensor], drew: bool) -> None:
        """Takes an operator that was run, and may have drawn globally; records dropout in evaluation."""
        # Outside of inference mode, dropout is a mask that is divided by the share that is kept.
        is_mask = name == "aten::div_" and args[0] is self._mask
        self._mask = args[0] if drew and name == "aten::bernoulli_" else None
        is_dropout = is_mask or (drew and any(part in name for part in _DROPS))
        if is_dropout and not torch.is_grad_enabled():
            self._recorder.add("dropout")
        if not self._follows or in_backward():
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name.endswith(_SHAPE_ONLY) or (drew and name.endswith("_")):
            inputs = []
        known = [self._known.get(tensor) for tensor in inputs]
        sources = [draw for kind in known if isinstance(kind, list) for draw in kind]
        trained = [tensor.requires_grad for tensor in inputs]
        met, data = "activation" in known, "data" in known
        into_data = data or any(of for of, kind in zip(trained, known, strict=True) if not isinstance(kind, list))
        if into_data and not met:
            self.draws += [draw for draw in sources if draw not in self.draws]
        if is_mask:
            sources = []
        # One value for a batch does not differ between its samples.
        elif drew and not is_dropout and any(out.numel() > 1 for out in outputs):
            sources = [*sources, {"op": name.partition("::")[2], "place": user_place()}]
        is_activation = met or (any(trained) and not all(trained))
        kind = "activation" if is_activation else sources or ("data" if data else None)
        for out in outputs:
            self._known[out] = kind


_DROPOUT = "aten::native_dropout"
_PERMUTATION = "aten::randperm"


class Draw(NamedTuple):
    """The results of an operator that draws random numbers."""

    name: str
    outputs: list[torch.Tensor]


class RandomReplay(DispatchMode):
    """Sees each operator that draws from a torch generator while it is entered.

    Attributes:
        draws: The recorded draws.
        most: Most values of one draw from torch's global generator.
        recording: Whether the draws are kept.
        failures: Why draws could not be replaced, in plain words.
        flow: Follows the draws, or None.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.most = 0
        self.recording = False
        self.failures: list[str] = []
        self._ranks: Sequence[Sequence[Draw]] | None = None
        self._position = 0
        self.flow: DrawFlow | None = None

    def replay(self, ranks: Sequence[Sequence[Draw]] | None) -> None:
        """Replaces the next draws by those of the ranks, concatenated."""
        self._ranks, self._position = ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator; if it draws random numbers, records or replaces them."""
        name = func._schema.name
        may_draw = torch.Tag.nondeterministic_seeded in func.tags or name in _RECURRENT
        if not may_draw and self.flow is None:
            return func(*args, **(kwargs or {}))
        private = (kwargs or {}).get("generator") is not None or any(isinstance(arg, torch.Generator) for arg in args)
        before = _states() if may_draw else []
        result = func(*args, **(kwargs or {}))
        # Attention without dropout is marked as an operator that draws, but does not; whether a program takes it may
        # depend on the masks of a batch.
        draws = may_draw and (private or not all(map(torch.equal, before, _states())))
        parts = result if isinstance(result, tuple | list) else (result,)
        outputs = [out for out in parts if isinstance(out, torch.Tensor)]
        if self.flow is not None:
            self.flow.see(name, args, kwargs or {}, outputs, drew=draws and not private)
        if not draws:
            return result
        if not private:
            self.most = max([self.most, *(out.numel() for out in outputs)])
        if self._ranks is not None:
            if reason := self._replace(name, outputs):
                self.failures.append(f"{name}: {reason}")
            elif name == _DROPOUT:
                outputs[0].copy_(args[0] * outputs[1] / (1 - args[1]))
        elif self.recording:
            self.draws.append(Draw(name, [out.detach().clone() for out in outputs]))
        return result

    def _replace(self, name: str, outputs: list[torch.Tensor]) -> str:
        """Copies the ranks' draws into the outputs; returns why it cannot, or nothing."""
        assert self._ranks is not None
        if any(self._position >= len(draws) for draws in self._ranks):
            return "one process draws more often than the ranks"
        parts = [draws[self._position] for draws in self._ranks]
        self._position += 1
        if any(part.name != name for part in parts):
            return "one process draws in another order than the ranks"
        # The first output of dropout is computed from its mask.
        for place in range(1 if name == _DROPOUT else 0, len(outputs)):
            drawn = [part.outputs[place] for part in parts]
            whole = outputs[place]
            if name == _PERMUTATION:
                # Each rank permutes its own samples.
                starts = [sum(len(part) for part in drawn[:number]) for number in range(len(drawn))]
                drawn = [part + start for part, start in zip(drawn, starts, strict=True)]
            if all(torch.equal(part, drawn[0]) for part in drawn) and drawn[0].shape == whole.shape:
                whole.copy_(drawn[0])
            elif (axis := joining_axis(drawn, whole)) is not None:
                whole.copy_(torch.cat(drawn, axis))
            else:
                return f"draws of the shape {tuple(drawn[0].shape)} on each rank are not part of {tuple(whole.shape)}"
        return ""


def _states() -> list[torch.Tensor]:
    """Returns the states of torch's global generators, of the CPU and of real GPUs."""
    return [generator.get_state() for generator in (torch.default_generator, *torch.cuda.default_generators)]


def joining_axis(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> int | None:
    """Returns the dimension along which the parts have the shape of the whole; None if there is none."""
    shapes = [torch.empty(part.shape, device="meta") for part in parts]
    for axis in range(whole.ndim):
        # Other shapes raise an error.
        with suppress(RuntimeError, IndexError):
            if torch.cat(shapes, axis).shape == whole.shape:
                return axis
    return None


class DrawProbe:
    """Records or replaces the draws between a batch and the next one."""

    def __init__(self, recorder: Recorder, spec: Spec, feed: RankBatches | None, own: OwnGenerators) -> None:
        self.recorder, self.spec, self.feed, self.own = recorder, spec, feed, own
        self.tape = RandomReplay()
        self.tape.recording = spec.purpose == "numbers" and feed is None
        if spec.purpose == "train":
            self.tape.flow = DrawFlow(recorder)
        self._entered = False
        self._newest: dict[str, Any] | None = None
        self._hidden: dict[str, Any] = {}
        self._own: dict[int, Any] = {}

    def enter(self, batch: dict[str, Any], content: Any) -> None:
        """Begins the step after a training batch with this content, or sees dropout after a batch of an evaluation."""
        if not batch["trains"] and not self.tape.flow:
            return
        if self.tape.flow:
            self.tape.flow.begin(content, follows=batch["trains"])
        if batch["trains"]:
            self._newest, self.tape.most = batch, 0
            if self.feed:
                self.tape.replay(self.feed.draws(batch["loader"], batch["iteration"], batch["number"]))
            self._hidden, self._own = states_of_global(), self.own.states()
        self._entered = True
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Ends the step after the newest batch, and keeps its draws."""
        if self._entered:
            self._entered = False
            self.tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch, self._newest = self._newest, None
        if batch is None:
            return
        batch["drawn"] = self.tape.most
        values = values_drawn(self._hidden, states_of_global())
        batch["hidden"] = {name: number for name, number in values.items() if number}
        batch["own_step"] = self.own.drawn(self._own)
        batch["flows"] = self.tape.flow.draws if self.tape.flow else []
        hidden = [*batch["hidden"], *([OWN] if batch["own_step"] else [])]
        self.recorder.add("drew", hidden=" and ".join(hidden))
        draws, self.tape.draws = self.tape.draws, []
        if self.recorder.later:
            return
        for number, draw in enumerate(draws):
            for place, output in enumerate(draw.outputs):
                name = f"draw/{batch['loader']}/{batch['iteration']}/{batch['number']}/{number}/{place}/{draw.name}"
                self.recorder.tensors[name] = output
