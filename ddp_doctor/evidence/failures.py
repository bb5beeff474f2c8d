"""Why a run failed, in the words of the user's own program."""

from __future__ import annotations

from pathlib import Path

from ddp_doctor.records.run import RankRecord, Run


def reason_of(run: Run) -> str:
    """Returns the traceback of the first rank that failed, or how the first one was lost."""
    for rank in run.ranks:
        if rank.error:
            return rank.error["trace"] or rank.error["message"]
    lost = run.lost[0]
    return f"Rank {lost.rank} ended with exit code {lost.code} before its end.\n{lost.output[-2000:]}"


def short_reason(run: Run) -> str:
    """Returns why a run failed in one line, such as `rank 1: ValueError: no data`."""
    for rank in run.ranks:
        if rank.error:
            lines = rank.error["message"].strip().splitlines() or [""]
            where = f"rank {rank.rank}: " if len(run.ranks) > 1 else ""
            return f"{where}{rank.error['type']}: {lines[0][:200]}".rstrip(": ")
    if run.hung:
        return "it hung"
    if not run.ranks:
        return "it was not started"
    lost = run.lost[0]
    last = next(iter(reversed(lost.output.strip().splitlines())), "")[:200]
    code = "" if lost.code is None else f" with exit code {lost.code}"
    return f"rank {lost.rank} ended{code} before its end" + (f": {last}" if last else "")


def stacks_of(run: Run) -> str:
    """Returns where each rank failed, waited or hung."""
    found = []
    for rank in run.ranks:
        if rank.error:
            found.append(f"Rank {rank.rank} failed:\n{rank.error['trace']}")
        elif rank.stack:
            found.append(f"Rank {rank.rank} waited or hung in step {_last_step(rank)}:\n{_main_thread(rank.stack)}")
        elif rank.code is not None and not rank.events:
            how = f"was killed by signal {-rank.code}" if rank.code < 0 else f"exited with code {rank.code}"
            found.append(f"Rank {rank.rank} {how}.\n{rank.output[-1500:]}")
    return "\n".join(found)


def _last_step(rank: RankRecord) -> int:
    return max((event["step"] for event in rank.events), default=0)


def _main_thread(stack: str) -> str:
    """Returns the stack of the thread that runs the user's code, without the doctor's frames."""
    here = str(Path(__file__).parents[1])
    threads = [part for part in stack.split("\n\n") if here + "/probes/install.py" not in part]
    return "\n".join(line for part in threads for line in part.splitlines() if here not in line)
