"""Runs a job in one rank. A spawned process imports only this module and its engine."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from lit_mnist.checkpoint.store import find_newest_valid
from lit_mnist.distributed.debugger import wait_for_debugger
from lit_mnist.distributed.rank import Rank, call_with_deep_stack, keep_memory
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.engines.capabilities import load_engine
from lit_mnist.run.job import Job


def do_job(job: Job, rank: Rank) -> None:
    """Runs a job in one rank with the job's number of threads."""
    prepare_process(job.threads, deterministic=bool(job.config["trainer"].get("deterministic")))
    wait_for_debugger(rank, job.run.timeout)
    if job.trains and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        # The run was restarted after a rank was lost: it resumes from the newest checkpoint.
        found = find_newest_valid(job.folder, RANK_STATUS.warn if rank.is_first else lambda _: None)
        job = replace(job, checkpoint=found.path if found else job.checkpoint)
    call_with_deep_stack(load_engine(job.engine).run, job, rank)


def prepare_process(threads: int, *, deterministic: bool) -> None:
    """Sets the number of threads of a rank, its memory allocator, and whether its algorithms are deterministic."""
    # Lightning, Fabric and Accelerate choose their own number if the variable is not set.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    keep_memory()
    if deterministic:
        # cuBLAS is deterministic only with this setting.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # The call takes a second to import torch's compiler. An optimizer imports it anyway, an evaluation does not.
        torch.use_deterministic_algorithms(True)
