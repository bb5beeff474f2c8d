"""What an examination shows beside its findings: stages, protection, samples, and the comparison. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The first words of `error` or `hang` of a report if the fault is the doctor's.
DEFECT = "The program runs without the doctor, but fails under it"


@dataclass(frozen=True)
class Stage:
    """One stage of the examination.

    Attributes:
        name: Such as `determinism`.
        outcome: One sentence, such as `two runs gave bit-identical weights`.
        seconds: How long it took.
    """

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Files:
    """How the user's files were kept from the examined code.

    Attributes:
        protection: `private view`: the kernel showed a copy-on-write view of all files. `copy`: the code ran in a copy
            of the current folder. Empty if nothing was run.
        not_covered: What this does not protect, in sentences.
        kept: The folder with the files that the code wrote; empty if they were removed.
        remote: The addresses on other machines that the code connected to. What it wrote there is written.
    """

    protection: str = ""
    not_covered: Sequence[str] = ()
    kept: str = ""
    remote: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """The comparison of the ranks with one process that gets their samples.

    Attributes:
        made: Whether it was made.
        method: How one process was given the samples of the ranks.
        reason: Why it was not made; empty if it was.
        option: What would make it possible, as a sentence; empty if nothing is known.
        differences: For each step, the largest difference of a gradient, relative to the largest gradient.
        threshold: A larger difference is not rounding.
        module: The first module whose outputs differ; empty if there is none.
        modules: The modules of the first step with their classes, in the order of their calls, up to 200.
    """

    made: bool = False
    method: str = ""
    reason: str = ""
    option: str = ""
    differences: Sequence[float] = ()
    threshold: float = 0.0
    module: str = ""
    modules: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Batch:
    """The samples that a rank trains on in one optimizer step.

    Attributes:
        step: The step, from 0.
        epoch: The training epoch, from 0.
        rank: The rank.
        size: Number of samples.
        samples: The first samples: their indices, or short digests of a stream.
        shared: Those of `samples` that another rank has in the same epoch.
    """

    step: int
    epoch: int
    rank: int
    size: int
    samples: Sequence[str] = ()
    shared: Sequence[str] = ()
