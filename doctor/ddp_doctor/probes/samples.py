"""The data sets and samplers of the loaders: what their indices mean, and how the workers are seeded."""

import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from ddp_doctor.probes.generators import OwnGenerators, generators, seed_unseen
from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import OWN, Spec
from ddp_doctor.torch_internals import tree_leaves, tree_map

# Samples of a data set that are called directly, and the seconds of the processor that this may take on any load.
_MOST_CALLS = 64
_MOST_SECONDS = 1.0
# The values of a data set that are recorded: those of all samples, and the first ones of each of their leaves.
_MOST_ROWS, _MOST_VALUES = 8192, 16
# Data sets around a Subset, such as one that augments its samples.
_MOST_LAYERS = 4


class SampleProbe:
    """Observes data sets and the seeds of workers, and applies interventions on the order of the samples.

    Attributes:
        datasets: The data sets below all Subsets, in the order of first use.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.datasets: list[Any] = []
        self._seeded = False

    def call_datasets(self) -> None:
        """Calls the data sets directly at the end: which sample an index means, and whether it is random."""
        if self.spec.purpose != "train" or self.spec.interventions:
            return
        for number, dataset in enumerate(self.datasets):
            # A data set of the user may raise anything.
            with suppress(Exception):
                self._call(number, dataset)

    def _call(self, number: int, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not len(dataset):
            return
        size, begun = len(dataset), time.process_time()
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
                used |= {OWN} if own.drawn(before_own) else set()
            # A value that the same seed does not repeat says nothing about the sample.
            seen[str(index)] = [one if one == same else "" for one, same in zip(calls[0], calls[1], strict=False)]
            random_samples += calls[0] != calls[2]
            if time.process_time() > begun + _MOST_SECONDS:
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
        rows, begun = [], time.process_time()
        for index in range(len(dataset)):
            seed_unseen(index)
            rows.append([_values(leaf) for leaf in tree_leaves(dataset[index])])
            if time.process_time() > begun + _MOST_SECONDS:
                return
        self.recorder.add("rows", base=number, dataset=type(dataset).__name__, rows=rows)

    def prepare(self, loader: Any, number: int, iteration: int, epoch: int) -> None:
        """Applies the interventions to a loader before an epoch, and observes its workers."""
        if self.spec.interventions.get("set_epoch"):
            for owner in _owners(loader):
                if callable(getattr(owner, "set_epoch", None)):
                    owner.set_epoch(epoch)
        if self.spec.interventions.get("no_workers") and loader.num_workers:
            loader.num_workers, loader.timeout = 0, 0
        if loader.num_workers and self.spec.purpose == "train":
            known = getattr(loader.worker_init_fn, "func", None)
            original = loader.worker_init_fn.args[1] if known is _in_worker else loader.worker_init_fn
            loader.worker_init_fn = functools.partial(_in_worker, str(self._file(number, iteration)), original)

    def seed_ranks(self) -> None:
        """Seeds the ranks equally at the first training batch, if that is the intervention."""
        if "seeds" in self.spec.interventions and not self._seeded:
            seed_unseen(self.spec.seed)
        self._seeded = True

    def perturbed(self, batch: Any, loader: int) -> Any:
        """Returns a batch with other samples, if that is the intervention for this rank and loader."""
        first, *loaders = self.spec.interventions.get("perturb") or [0]
        if loader not in loaders or self.recorder.rank < first:
            return batch
        factor = self.spec.interventions["factor"]

        def change(leaf: torch.Tensor) -> torch.Tensor:
            if leaf.is_floating_point():
                # Labels may be 0.0 and 1.0, and a metric may reject others.
                is_label = leaf.numel() == len(leaf) and bool((leaf == leaf.round()).all()) if leaf.ndim else False
                return leaf.flip(0) if is_label else factor * leaf.flip(0)
            return leaf if leaf.ndim < 2 else leaf.flip(-1) if factor > 0 else leaf.roll(1, -1)

        return tree_map(change, batch)

    def of_workers(self, loader: int, iteration: int) -> list[dict[str, str]]:
        """Returns digests of the generators with which the workers of an epoch began, in their order."""
        paths = sorted(self.recorder.folder.glob(f"{self._file(loader, iteration).name}-*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def _file(self, loader: int, iteration: int) -> Path:
        return self.recorder.folder / f"worker{self.recorder.rank}-{loader}-{iteration}"


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


def describe_loader(loader: Any) -> dict[str, Any]:
    """Returns what is known of an epoch of a loader when it begins."""
    dataset, is_iterable = loader.dataset, isinstance(loader.dataset, IterableDataset)
    replicas = max((_replicas(owner) for owner in _owners(loader)), default=0)
    return {
        "sampler": None if is_iterable else type(loader.sampler).__name__,
        "dataset": type(dataset).__name__,
        "workers": loader.num_workers,
        "iterable": is_iterable,
        "samples": _length(dataset),
        "batches": None if is_iterable else _length(loader),
        "gradients": torch.is_grad_enabled(),
        "indices": [],
        "ascending": True,
        "yielded": 0,
        "complete": False,
        "drained": False,
        "trains": False,
        "replicas": replicas,
        "divided": _selection(dataset) if replicas > 1 else "",
        "set_epoch": [type(owner).__name__ for owner in _owners(loader) if callable(getattr(owner, "set_epoch", None))],
    }


def _replicas(owner: Any) -> int:
    """Returns for how many ranks a sampler divides the samples, as torch's samplers name it; 0 if it does not say."""
    found = getattr(owner, "num_replicas", 0)
    return found if isinstance(found, int) else 0


def _selection(dataset: Any) -> str:
    """Returns a digest of what a Subset selects, which may be below data sets that change its samples; or nothing."""
    with suppress(TypeError, ValueError, RuntimeError):
        for _ in range(_MOST_LAYERS):
            if isinstance(dataset, Subset):
                return digest(torch.as_tensor(dataset.indices))
            inner = [value for value in vars(dataset).values() if isinstance(value, Dataset)]
            if len(inner) != 1 or _length(inner[0]) != _length(dataset):
                break
            dataset = inner[0]
    return ""


def _length(value: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):
        return len(value)
    return None


def base_indices(dataset: Any, indices: list[int]) -> list[int]:
    """Returns the indices in the data set below all Subsets."""
    with suppress(IndexError, TypeError, ValueError):
        found = indices
        while isinstance(dataset, Subset):
            found = [int(dataset.indices[index]) for index in found]
            dataset = dataset.dataset
        return found
    return indices


def _owners(loader: Any) -> list[Any]:
    """Returns the samplers of a loader, those inside of them, and the data set."""
    found = [loader.sampler, loader.batch_sampler, below_subsets(loader.dataset)]
    for owner in found:
        inner = [getattr(owner, name, None) for name in ("sampler", "batch_sampler")]
        found += [one for one in inner if not any(one is other for other in found)]
    return found


def _in_worker(path: str, original: Callable[[int], None] | None, worker: int) -> None:
    """Runs the user's `worker_init_fn`, and writes with which random numbers the worker begins."""
    if original is not None:
        original(worker)
    own = OwnGenerators()
    own.find()
    states = sorted(map(digest, own.states().values()))
    found = {**generators(), OWN: digest(states), "own_states": states}
    Path(f"{path}-{worker:03d}.json").write_text(json.dumps(found))
