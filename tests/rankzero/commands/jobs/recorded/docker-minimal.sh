#!/bin/bash
cd -- /home/user/project || exit 2
exec docker run --user="$(id -u):$(id -g)" --rm --init --network=host --ipc=host --env=HOME=/tmp --env=RANKZERO_KEY --volume=/home/user/project:/home/user/project --volume=/home/user/project/runs:/home/user/project/runs --workdir=/home/user/project -- rankzero \
    python -m rankzero fit \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --model ResNet --model.hidden_sizes '[8, 8]'
