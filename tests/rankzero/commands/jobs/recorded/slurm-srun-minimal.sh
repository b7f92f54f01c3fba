#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=my-run
#SBATCH --nodes=1
#SBATCH --output=/home/user/project/runs/my-run.job.log
#SBATCH --open-mode=append
#SBATCH --requeue
# For a run that does not know its time limit: after this signal, it saves, and the job is requeued.
#SBATCH --signal=USR1@120
#SBATCH --wait-all-nodes=1

cd -- /home/user/project || exit 2
# In Slurm 22.05 and 23.02, srun does not inherit --cpus-per-task from sbatch.
exec srun --export=ALL --kill-on-bad-exit=1 \
    /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --model ResNet --model.hidden_sizes '[8, 8]'
