#!/bin/bash
# PBS does not read the line above.
#PBS -S /bin/bash
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4:mem=64gb:a100
#PBS -N my-run
#PBS -l walltime=02:00:00
# Without place=scatter, PBS may put several chunks on one machine.
#PBS -l place=scatter
#PBS -q gpu
#PBS -A 'my project'
#PBS -W depend=afterok:123
#PBS -M me@example.org
#PBS -m ae
#PBS -j oe
#PBS -o '/home/user/project/my runs/my-run.job.log'
# Write the output during the job, not at its end.
#PBS -k doe
#PBS -r n

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
    --name=my-run '--root=/home/user/project/my runs' --nodes=2 --devices=4 --accelerator=gpu --requeue=never --model ResNet --model.hidden_sizes '[8, 8]'
END_OF_TASK

name=my-run
root='/home/user/project/my runs'
# The programs of PBS are not on the PATH of every job.
config=${PBS_CONF_FILE:-/etc/pbs.conf}
[ -r "$config" ] && PATH=$PATH:$(sed -n 's/^PBS_EXEC=//p' "$config")/bin
mark=$root/.$name.job
mkdir -p -- "$root" && : >"$mark" || exit 1
rm -f -- "$mark.stop"
stopped=
trap 'stopped=$SECONDS' TERM
pbsdsh -- /bin/bash -lc "$task" task &
launcher=$!
# After SIGTERM, the launcher ends before the processes, which are saving. PBS kills them when this script ends.
until wait "$launcher"; code=$?; [ -n "$stopped" ] || [ "$code" -lt 128 ] || ! kill -0 "$launcher" 2>/dev/null; do :; done
while [ -n "$stopped" ] && [ -e "$root/.$name.lock" ] && [ "$SECONDS" -lt "$((stopped + 600))" ]; do sleep 0.2; done
summary=$root/$name/summary.json
if ! [ "$summary" -nt "$mark" ]; then
    if [ "$code" -eq 0 ] && grep -qs '"status": "finished"' "$summary"; then exit 0; fi  # the run had finished before
    echo "no process began to train, or all were killed before the run could stop" >&2
    exit 1
fi
# What processes print after SIGTERM is lost with the launcher; the log of rank zero ends with the same table.
[ -z "$stopped" ] || tac -- "$root/$name/logs/rank-000.log" | sed "/ INFO run $name: /q" | tac | sed 's/.* INFO //'
if grep -q '"status": "finished"' "$summary"; then exit 0; fi
grep -q '"another_attempt": true' "$summary" || exit 1
# The run was stopped with its checkpoint saved. After `submit.py stop` or qdel, it is not submitted again.
if [ ! -e "$mark.stop" ] && { [ -z "$stopped" ] || [ "$stopped" -ge 7170 ]; }; then
    log=$root/$name.job.log
    # The next job would overwrite the log.
    [ -e "$log" ] && mv -- "$log" "$log.$PBS_JOBID"
    cd -- "$root" && qsub ${RANKZERO_KEY:+-v RANKZERO_KEY} '/home/user/project/my runs/my-run.job.sh' >"$mark.next" && exit 75
    echo "qsub failed; submit the script again to resume run $name" >&2
fi
exit 75
