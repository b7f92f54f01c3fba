#!/bin/bash
#SBATCH --job-name=ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out

source ~/venv/bin/activate
RDV_ADDR=$(hostname)

srun torchrun --nproc_per_node=4 --nnodes=$SLURM_JOB_NUM_NODES --rdzv_id=$SLURM_JOB_ID \
    --rdzv_backend=c10d --rdzv_endpoint=$RDV_ADDR train.py
