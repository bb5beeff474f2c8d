#!/bin/bash
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29633 WORLD_SIZE=2
RANK=0 LOCAL_RANK=0 python torchrun_loop.py &
RANK=1 LOCAL_RANK=1 python torchrun_loop.py &
wait
