#!/bin/bash
cd -- /home/user/project || exit 2
exec apptainer exec --bind=/home/user/project --bind=/home/user/project/runs --pwd=/home/user/project -- image.sif \
    python -m rankzero fit \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --model ResNet --model.hidden_sizes '[8, 8]'
