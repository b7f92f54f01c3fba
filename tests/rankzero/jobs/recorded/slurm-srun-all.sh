#!/bin/bash
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --job-name=my-run
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --mem=64G
#SBATCH --time=02:00:00
#SBATCH --partition=gpu
#SBATCH --account="my project"
#SBATCH --constraint=a100
#SBATCH --exclude=n7,n8
#SBATCH --dependency=afterok:123
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL,REQUEUE
#SBATCH --output="/home/user/project/my runs/my-run.job.log"
#SBATCH --open-mode=append
#SBATCH --requeue
# For a run that does not know its time limit: after this signal, it saves, and the job is requeued.
#SBATCH --signal=USR1@120
#SBATCH --wait-all-nodes=1
#SBATCH --exclusive

cd -- /home/user/project || exit 2
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || exit 2
module load gcc || exit 2
source settings.sh
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=8
# In Slurm 22.05 and 23.02, srun does not inherit --cpus-per-task from sbatch.
# Without --gpu-bind=none, a task sees only its own GPU, and NCCL cannot use the direct links between GPUs.
exec srun --export=ALL --kill-on-bad-exit=1 --cpus-per-task=8 --gpu-bind=none \
    /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run '--root=/home/user/project/my runs' --nodes=2 --devices=4 --accelerator=gpu --model ResNet --model.hidden_sizes '[8, 8]'
