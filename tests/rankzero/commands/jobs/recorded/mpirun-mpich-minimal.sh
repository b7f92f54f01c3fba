#!/bin/bash
# Every process runs these lines, in a login shell: the variables of this script do not reach other machines.
IFS= read -r -d '' task <<'END_OF_TASK'
cd -- /home/user/project || exit 2
exec /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --model ResNet --model.hidden_sizes '[8, 8]'
END_OF_TASK

cd -- /home/user/project || exit 2
# Waits for a process; a signal to this script interrupts `wait`.
wait_for() {
    until wait "$1"; code=$?; [ "$code" -lt 128 ] || ! kill -0 "$1" 2>/dev/null; do :; done
}
# After SIGUSR1, which mpiexec passes on, the processes save and stop.
trap 'kill -USR1 "$launcher"' TERM INT
mpiexec.hydra -n 1 -ppn 1 \
    /bin/bash -lc "$task" task &
launcher=$!
wait_for "$launcher"
exit "$code"
