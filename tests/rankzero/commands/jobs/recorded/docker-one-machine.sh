#!/bin/bash
cd -- /home/user/project || exit 2
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || exit 2
module load gcc || exit 2
source settings.sh
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=8
exec docker run --user="$(id -u):$(id -g)" --rm --init --network=host --ipc=host --env=HOME=/tmp --env=RANKZERO_KEY --gpus=4 --memory=64g --cpus=32 --env=OMP_NUM_THREADS=8 --volume=/home/user/project:/home/user/project '--volume=/home/user/project/my runs:/home/user/project/my runs' --workdir=/home/user/project -- rankzero \
    python -m rankzero fit \
    --name=my-run '--root=/home/user/project/my runs' --nodes=1 --devices=4 --time_limit=7200s --accelerator=gpu --model ResNet --model.hidden_sizes '[8, 8]'
