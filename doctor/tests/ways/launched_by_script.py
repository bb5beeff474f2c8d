"""python launched_by_script.py: starts itself again for each rank."""

import argparse
import os
import subprocess
import sys

from torchrun_loop import main

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, default=None)
parser.add_argument("--nprocs", type=int, default=2)
args = parser.parse_args()

if args.local_rank is None:
    children = []
    for i in range(args.nprocs):
        command = [sys.executable, __file__, f"--local-rank={i}", f"--nprocs={args.nprocs}"]
        children.append(subprocess.Popen(command))
    sys.exit(max(child.wait() for child in children))

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
os.environ.update(RANK=str(args.local_rank), WORLD_SIZE=str(args.nprocs))
main()
