"""The recorded batches and draws of several ranks, joined for one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ddp_doctor.probes.draws import Draw
from ddp_doctor.torch_internals import tree_leaves, tree_map


class RankBatches:
    """What the ranks of a run were given.

    Args:
        folder: Folder of the run.
        world_size: Number of ranks.
        reverse: Reverses the samples of each batch, which changes rounding only.

    Attributes:
        failures: Why a batch could not be joined, in plain words.
    """

    def __init__(self, folder: Path, world_size: int, *, reverse: bool = False) -> None:
        # Each process of a command does this, including workers: mapped files are in memory once, and only as needed.
        loaded = [torch.load(folder / f"rank{rank}.pt", weights_only=True, mmap=True) for rank in range(world_size)]
        self.tensors: list[dict[str, torch.Tensor]] = [part["tensors"] for part in loaded]
        self.failures: list[str] = []
        self.reverse = reverse
        epochs = [event for event in loaded[0]["events"] if event["kind"] == "epoch" and event["trains"]]
        self._training = {(event["loader"], event["iteration"]) for event in epochs}
        self._draws: dict[tuple[int, str], list[Draw]] = {}
        for rank, tensors in enumerate(self.tensors):
            for name, tensor in tensors.items():
                if name.startswith("draw/"):
                    key, operator = "/".join(name.split("/")[:4]), name.split("/", 6)[6]
                    number = int(name.split("/")[4])
                    draws = self._draws.setdefault((rank, key), [])
                    if number == len(draws):
                        draws.append(Draw(operator, []))
                    draws[number].outputs.append(tensor)

    @staticmethod
    def tensors_of(batch: Any, loader: int, iteration: int, number: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of a batch by the names under which they are recorded."""
        leaves = tree_leaves(batch)
        return {
            f"batch/{loader}/{iteration}/{number}/{place}": leaf.detach().clone()
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }

    def trains(self, loader: int, iteration: int) -> bool:
        """Returns whether the ranks trained in this iteration of a loader."""
        return (loader, iteration) in self._training

    def has(self, loader: int, iteration: int, number: int) -> bool:
        """Returns whether all ranks had this batch."""
        prefix = f"batch/{loader}/{iteration}/{number}/"
        return all(any(name.startswith(prefix) for name in tensors) for tensors in self.tensors)

    def batch(self, template: Any, loader: int, iteration: int, number: int) -> Any:
        """Returns a batch of the ranks, concatenated.

        Args:
            template: A batch of this process, of the same structure.
            loader: Number of the loader.
            iteration: Number of its iteration.
            number: Number of the batch.
        """
        places = iter(range(1_000_000))

        def join(leaf: Any) -> Any:
            place = next(places)
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, int | float | bool | type(None)):
                    self._fail(f"it contains values of the type {type(leaf).__name__}, not only tensors")
                return leaf
            name = f"batch/{loader}/{iteration}/{number}/{place}"
            parts = [tensors[name] for tensors in self.tensors if name in tensors]
            if len(parts) != len(self.tensors) or any(part.ndim != leaf.ndim for part in parts):
                self._fail("its structure differs between the ranks and one process")
                return leaf
            if not leaf.ndim:
                if not all(torch.equal(part, parts[0]) for part in parts):
                    self._fail("it contains a number per batch, which differs between the ranks")
                return parts[0]
            if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
                self._fail("the shapes of the ranks differ, as after padding to the longest sample")
                return leaf
            return torch.cat(parts).flip(0) if self.reverse else torch.cat(parts)

        return tree_map(join, template)

    def draws(self, loader: int, iteration: int, number: int) -> list[list[Draw]]:
        """Returns the draws of each rank in the step after a batch."""
        key = f"draw/{loader}/{iteration}/{number}"
        return [self._draws.get((rank, key), []) for rank in range(len(self.tensors))]

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights of rank 0 before the first step of each optimizer, by `<optimizer>:<position>`."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors[0].items():
            if name.startswith("before/"):
                found.setdefault(name.split("/", 2)[2], tensor)
        return found

    def _fail(self, why: str) -> None:
        if why not in self.failures:
            self.failures.append(why)
