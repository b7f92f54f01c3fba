#!/bin/bash
hosts=(n1 user@n2)

# The key by which the ranks recognize one another. Other users could read it on a command line.
key=${RANKZERO_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# Every host runs these lines. The processes stop when the connection is closed.
IFS= read -r -d '' task <<'END_OF_TASK'
IFS= read -r RANKZERO_KEY && export RANKZERO_KEY
cd -- /home/user/project || exit 2
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 || exit 2
module load gcc || exit 2
source settings.sh
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=8
exec 3<&0
/home/user/project/.venv/bin/python /home/user/project/launch/fit.py \
    --name=my-run '--root=/home/user/project/my runs' --nodes=2 --devices=4 --time_limit=7200s --model ResNet --model.hidden_sizes '[8, 8]' \
    --node_rank="$1" --master_addr=n1 --master_port=21147 3<&- &
training=$!
{ while read -r _; do :; done; kill -TERM "$training"; } <&3 >/dev/null 2>&1 &
connection=$!
wait "$training"
code=$?
kill "$connection" 2>/dev/null
exit "$code"
END_OF_TASK

# After the key, all connections read from this pipe, which is closed when this script ends or is stopped, or when one
# host fails.
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/pipe" && : >"$folder/codes" || exit 1
exec 9<>"$folder/pipe"
exec 8<"$folder/pipe"
trap 'exec 9>&-' TERM INT
quote="'\\''"
connections=()
for node in "${!hosts[@]}"; do
    {
        ssh -o BatchMode=yes -o ServerAliveInterval=15 -- "${hosts[$node]}" \
            "bash -lc '${task//\'/$quote}' task $node" < <(printf '%s\n' "$key"; exec cat <&8) 2>&1 |
            sed -u "s/^/[${hosts[$node]}] /"
        status=${PIPESTATUS[0]}
        : >"$folder/$node"
        [ "$status" -eq 0 ] || { echo "$status" >>"$folder/codes"; kill -TERM $$; }
    } 9>&- &
    connections+=($!)
done
for node in "${!hosts[@]}"; do
    # A signal to this script interrupts `wait`.
    until wait "${connections[$node]}" || ! kill -0 "${connections[$node]}" 2>/dev/null; do :; done
    [ -e "$folder/$node" ] || echo 1 >>"$folder/codes"
done
# The first failure is the cause; 75 means that the run was stopped.
result=$(grep -m 1 -vx 75 "$folder/codes" || head -n 1 "$folder/codes")
exit "${result:-0}"
