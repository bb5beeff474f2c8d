"""python compared_command.py COMMAND...: prints how a command is compared with one process."""

import sys
import time

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.files.protection import Protection
from ddp_doctor.files.temporary import examination_folder
from ddp_doctor.launch.commands import CommandRunner
from ddp_doctor.records.spec import Spec, Target


def compared(command, timeout=150.0, **options):
    """Returns the comparison of a command, and the runs."""
    spec = Spec(Target(command=tuple(command)), world_size=2, timeout=timeout, **options)
    with examination_folder() as folder:
        protection = Protection(folder)
        runner = CommandRunner(folder, protection)
        try:
            runner.preload()
            evidence = Evidence(spec, runner)
            return evidence.compare(), evidence.runs
        finally:
            protection.end()
            runner.close()


def forked_and_usual(command, timeout=150.0):
    """Returns the weights of each rank after each step: of a command as it is, and of one in forks that have torch."""
    spec = Spec(Target(command=tuple(command)), world_size=2, timeout=timeout)
    with examination_folder() as folder:
        protection = Protection(folder)
        runner = CommandRunner(folder, protection)
        try:
            usual = runner.run(spec)
            assert usual.worked, usual.short_reason
            assert runner.use_forks()
            forked = runner.run(spec)
            # It was not repeated as it is.
            assert runner.forks
            return [
                [[event["weights"] for event in rank.of_kind("stepped")] for rank in run.ranks]
                for run in (usual, forked)
            ]
        finally:
            protection.end()
            runner.close()


if __name__ == "__main__":
    begun = time.monotonic()
    options = {"gpus": 2} if "--gpus" in sys.argv else {}
    found, runs = compared([word for word in sys.argv[1:] if word not in {"--gpus", "-v"}], **options)
    print(found)
    for name, run in runs.items():
        print(
            name,
            [len(rank.of_kind("step")) for rank in run.ranks],
            run.short_reason if not run.worked else "worked",
            f"{run.seconds:.0f} s",
        )
    if not all(run.worked for run in runs.values()) or "-v" in sys.argv:
        for name, run in runs.items():
            print(name, run.folder, "".join(rank.output[-3000:] for rank in run.ranks[:1]))
    print(f"{time.monotonic() - begun:.0f} s")
