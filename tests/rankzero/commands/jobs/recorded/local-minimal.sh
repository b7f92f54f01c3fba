#!/bin/bash
cd -- /home/user/project || exit 2
exec /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --model ResNet --model.hidden_sizes '[8, 8]'
