#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=my-run
#SBATCH --nodes=1
#SBATCH --output=/home/user/project/runs/my-run.job.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Before the time limit, after this signal, the run saves and the job is requeued.
#SBATCH --signal=USR1@120
#SBATCH --wait-all-nodes=1

cd -- /home/user/project || exit 2
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 12000))
# srun does not inherit --cpus-per-task from sbatch (Slurm 22.05 and newer).
exec srun --export=ALL --kill-on-bad-exit=1 \
    /home/user/project/.venv/bin/python -m torch.distributed.run --nnodes=1 --nproc-per-node=1 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_node:$port" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout=120 \
    /home/user/project/launch/fit.py \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --model ResNet --model.hidden_sizes '[8, 8]'
