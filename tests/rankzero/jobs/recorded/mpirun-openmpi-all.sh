#!/bin/bash
# Every process runs these lines, in a login shell: the variables of this script do not reach other machines.
IFS= read -r -d '' task <<'END_OF_TASK'
cd -- /home/user/project || exit 2
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || exit 2
module load gcc || exit 2
source settings.sh
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=8
exec /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run '--root=/home/user/project/my runs' --nodes=2 --devices=4 --time_limit=7200s --model ResNet --model.hidden_sizes '[8, 8]'
END_OF_TASK

cd -- /home/user/project || exit 2
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || exit 2
module load gcc || exit 2
source settings.sh
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=8
# Waits for a process; a signal to this script interrupts `wait`.
wait_for() {
    until wait "$1"; code=$?; [ "$code" -lt 128 ] || ! kill -0 "$1" 2>/dev/null; do :; done
    [ "$code" -lt 128 ] || { wait "$1"; code=$?; } # the process may have ended just after the signal
}
# mpirun kills its processes a second after SIGTERM. After SIGUSR1, which it passes on, they save and stop.
trap 'kill -USR1 "$launcher"' TERM INT
mpirun -np 8 --map-by ppr:4:node --bind-to none \
    --host n1:4,user@n2:4 \
    -x MASTER_ADDR=n1 -x MASTER_PORT=21147 ${RANKZERO_KEY:+-x RANKZERO_KEY} \
    /bin/bash -lc "$task" task &
launcher=$!
wait_for "$launcher"
exit "$code"
