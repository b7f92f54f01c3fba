#!/bin/bash
export MASTER_PORT=1234
export NCCL_DEBUG=INFO
mpirun -np 8 -H n1:4,n2:4 -x MASTER_ADDR=n1 -x MASTER_PORT -x PATH -map-by slot \
    python main.py --epochs 90
