"""How a command is compared with one process, and its weights in forks and as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import RankComparison
from ddp_doctor.files.protection import Protection, examination_folder
from ddp_doctor.launch.runner import Runner
from ddp_doctor.records.spec import Spec, Target


@contextmanager
def _runner(target: Target) -> Iterator[Runner]:
    with examination_folder() as folder:
        protection = Protection(folder)
        runner = Runner(target, 2, folder, protection)
        try:
            yield runner
        finally:
            protection.end()
            runner.close()


def compared(command: list[str], timeout: float = 150.0) -> RankComparison:
    """Returns the comparison of a command with one process."""
    spec = Spec(Target(command=tuple(command)), world_size=2, timeout=timeout)
    with _runner(spec.target) as runner:
        return Evidence(spec, runner).compare()


def forked_and_usual(command: list[str], timeout: float = 150.0) -> list[list[list[str]]]:
    """Returns the weights of each rank after each step: of a command as it is, and of one in forks that have torch."""
    spec = Spec(Target(command=tuple(command)), world_size=2, timeout=timeout)
    with _runner(spec.target) as runner:
        usual = runner.run(spec)
        assert usual.worked, usual.short_reason
        runner.forks = True
        forked = runner.run(spec)
        # It was not repeated as it is.
        assert runner.forks
    return [[[event["weights"] for event in rank.of_kind("stepped")] for rank in run.ranks] for run in (usual, forked)]
