#!/bin/bash
cd -- /home/user/project || exit 2
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || exit 2
module load gcc || exit 2
source settings.sh
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=8
exec /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run '--root=/home/user/project/my runs' --nodes=1 --devices=4 --time_limit=7200s --model ResNet --model.hidden_sizes '[8, 8]'
