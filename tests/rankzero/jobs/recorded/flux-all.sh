#!/bin/bash
#flux: --job-name=my-run
#flux: --nodes=2
#flux: --nslots=8
#flux: --cores-per-slot=8
#flux: --gpus-per-slot=1
#flux: --time-limit=7200s
#flux: --queue=gpu
#flux: --bank='my project'
#flux: --requires=a100
#flux: --dependency=afterok:123
#flux: --output='/home/user/project/my runs/my-run.job.log'
#flux: --setopt=output.mode=append
# For a run that does not know its time limit: after this signal, it saves and stops.
#flux: --signal=USR1@120s
#flux: --exclusive

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
}
# A canceled job saves and stops, and is not started again.
canceled=
trap 'canceled=1' TERM INT HUP
trap : USR1 USR2 ALRM # warnings before the time limit
flux run --nodes=2 --ntasks=8 --cores-per-task=8 --gpus-per-task=1 \
    /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run '--root=/home/user/project/my runs' --nodes=2 --devices=4 --accelerator=gpu --model ResNet --model.hidden_sizes '[8, 8]' &
launcher=$!
wait_for "$launcher"
[ "$code" -eq 75 ] || exit "$code"
summary='/home/user/project/my runs/my-run'/summary.json
{ [ -z "$canceled" ] && grep -qs '"another_attempt": true' "$summary"; } || exit 1
# Flux does not requeue a job by its exit code.
cd -- '/home/user/project/my runs' && flux --parent batch '/home/user/project/my runs/my-run.job.sh' >.my-run.job.next && exit 75
echo 'flux batch failed; submit the script again to resume run my-run' >&2
exit 1
