#!/bin/bash
#PBS -N ddp
#PBS -l select=2:ncpus=16:ngpus=4
#PBS -l walltime=01:00:00
#PBS -q gpu

cd $PBS_O_WORKDIR
module load cuda
MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)

torchrun --nproc_per_node=4 --nnodes=2 --node_rank=$PBS_NODEID \
    --master_addr=$MASTER_ADDR --master_port=29500 train.py
