#!/bin/bash
# PBS does not read the line above.
#PBS -S /bin/bash
#PBS -l select=1:ncpus=1:mpiprocs=1
#PBS -N my-run
# Without place=scatter, PBS may put several chunks on one machine.
#PBS -l place=scatter
#PBS -j oe
#PBS -o /home/user/project/runs/my-run.job.log
# Write the output during the job, not at its end.
#PBS -k doe

# Every process runs these lines, in a login shell: the variables of this script do not reach other machines.
IFS= read -r -d '' task <<'END_OF_TASK'
cd -- /home/user/project || exit 2
exec /home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run --root=/home/user/project/runs --nodes=1 --devices=1 --requeue=never --model ResNet --model.hidden_sizes '[8, 8]'
END_OF_TASK

name=my-run
root=/home/user/project/runs
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
if [ ! -e "$mark.stop" ] && { [ -z "$stopped" ]; }; then
    log=$root/$name.job.log
    # The next job would overwrite the log.
    [ -e "$log" ] && mv -- "$log" "$log.$PBS_JOBID"
    cd -- "$root" && qsub ${RANKZERO_KEY:+-v RANKZERO_KEY} /home/user/project/runs/my-run.job.sh >"$mark.next" && exit 75
    echo "qsub failed; submit the script again to resume run $name" >&2
fi
exit 75
