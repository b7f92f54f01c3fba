#!/bin/bash
#BSUB -n 64
#BSUB -R "span[ptile=32]"
#BSUB -gpu "num=4"
#BSUB -J my-run
#BSUB -R "rusage[mem=64GB/host]"
#BSUB -W 2:00
#BSUB -q gpu
#BSUB -P 'my project'
#BSUB -R 'select[a100]'
#BSUB -w afterok:123
#BSUB -u me@example.org
#BSUB -N
#BSUB -o '/home/user/project/my runs/my-run.job.log'
# LSF requeues the job after a stop, and after the loss of a host.
#BSUB -Q "75"
#BSUB -r
# For a run that does not know its time limit: after this signal, it saves and stops.
#BSUB -wa USR1
#BSUB -wt 2
#BSUB -x

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
    --name=my-run '--root=/home/user/project/my runs' --nodes=2 --devices=4 --accelerator=gpu --model ResNet --model.hidden_sizes '[8, 8]'
END_OF_TASK

# Waits for a process; a signal to this script interrupts `wait`.
wait_for() {
    until wait "$1"; code=$?; [ "$code" -lt 128 ] || ! kill -0 "$1" 2>/dev/null; do :; done
    [ "$code" -lt 128 ] || { wait "$1"; code=$?; } # the process may have ended just after the signal
}
# A canceled job saves and stops, and is not started again.
canceled=
trap 'canceled=1' TERM INT HUP
trap : USR1 USR2 ALRM # warnings before the time limit
# LSF signals mpirun too, which by default kills its processes a second later. blaunch starts its daemons without ssh.
mpirun -np 8 --map-by ppr:4:node --hostfile "$LSB_DJOB_HOSTFILE" --bind-to none \
    --mca plm_rsh_agent blaunch --mca plm_rsh_no_tree_spawn 1 --mca orte_leave_session_attached 1 \
    --mca odls_base_sigkill_timeout 10 ${RANKZERO_KEY:+-x RANKZERO_KEY} /bin/bash -lc "$task" task &
launcher=$!
wait_for "$launcher"
[ "$code" -eq 75 ] || exit "$code"
summary='/home/user/project/my runs/my-run'/summary.json
{ [ -z "$canceled" ] && grep -qs '"another_attempt": true' "$summary"; } || exit 1
exit 75
