import pytest

from job_scripts import pbs, slurm, verify

START = "srun --cpus-per-task=4 --kill-on-bad-exit=1 torchrun"
TO = f"{START} --nnodes=2 --nproc-per-node=4"
C10D = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
SAME_RANK = "srun starts torchrun with node rank 0 on every machine"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"
OLD = "is deprecated, and adds --local-rank to the arguments of the script"
NEW = "torchrun --nproc_per_node=2 train.py"
RANKED = "torchrun --nnodes=2 --node_rank={} --master_addr=n1 --master_port=$PORT train.py"
BASH = f"torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 --master_port={PORT} train.py"
WAIT = 'for pid in "${pids[@]}"; do wait "$pid" || exit; done'
PET = "export PET_NNODES=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=n1:$P"
ON_PBS = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$port"
MPIRUN = 'mpirun -np {} --hostfile "$PBS_NODEFILE" --map-by ppr:1:node --bind-to none torchrun ' + ON_PBS


def loop(*end):
    """Returns a loop over machines, with these lines at its end."""
    options = "--nnodes=2 --node_rank=$rank --master_addr=n1 --master_port=$P"
    srun = f"srun -c 4 -K -N1 -n1 -w $host torchrun {options} train.py &"
    return ("rank=0", "for host in $(scontrol show hostnames); do", srun, *end, "done")


CASES = {
    "machines that cannot find each other": [
        *(
            (slurm("host=$(hostname)", "NODE_RANK=0", f"{TO} {options} train.py"), 11, "wrong", found)
            for options, found in (
                ("", "without an address, each of the 2 machines waits for the others on itself"),
                (C10D, "without an address"),
                ("--standalone", "--standalone ignores the other machines"),
                (f"{C10D} --rdzv-endpoint=localhost:0", "at localhost:0, each machine waits for the others on itself"),
                (
                    f"{C10D} --rdzv-endpoint=localhost:$PORT",
                    "at localhost:$PORT, each machine waits for the others on itself",
                ),
                (f"--node_rank=$RANK --master_addr=127.0.0.1 --master_port={PORT}", "at 127.0.0.1, each machine waits"),
                (
                    f"--master_addr=$host --master_port={PORT}",
                    "without --node-rank, every machine has node rank 0",
                ),
                (f"--node_rank=0 --master_addr=$host --master_port={PORT}", SAME_RANK),
                (f"--node_rank $NODE_RANK --master_addr=$host --master_port={PORT}", SAME_RANK),
            )
        ),
        slurm("host=$(hostname)", f"{TO} {C10D} --rdzv-endpoint=$host:{PORT} train.py"),
        slurm(f"srun --cpus-per-task=4 -K1 bash -c '{BASH}'"),
    ],
    "the old launcher is deprecated": [
        ("python3 -u -m torch.distributed.launch --nproc_per_node=2 train.py\n", 1, "risky", OLD, NEW),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py\n", 1, "risky", "deprecated", NEW),
    ],
    "commands for two machines one after the other": [
        (
            f"{RANKED.format(0)}\n{RANKED.format(1)}\n",
            *(1, "wrong", "node rank 0 waits for node rank 1, whose command starts after this one has ended"),
        ),
        f"{RANKED.format(0)} &\n{RANKED.format(1)} &\nwait\n",
        f"ssh n1 {RANKED.format(0)} &\nssh n2 {RANKED.format(1)} &\nwait\n",
    ],
    "each machine trains alone without the number of machines": [
        case
        for options in ("", "--standalone", "--nnodes=1")
        for command in [f"{START} {options} --nproc-per-node=4 train.py"]
        for case in (
            (slurm(command), 9, "wrong", "torchrun without --nnodes: each machine trains alone"),
            slurm(command, nodes=1),
            slurm(command.replace("srun ", "srun --nodes=1 ")),
        )
    ],
    "a loop over machines that waits for each": [
        *(
            (
                slurm("for i in 0 1; do", f"{start} {RANKED.format('$i')}", "done"),
                *(10, "wrong", "the loop starts the machines one after the other"),
            )
            for start in ("srun -c 4 -K -N1 -n1 -w ${n[$i]}", "ssh ${n[$i]}")
        ),
        (slurm(*loop("wait $! || exit", "((rank++))")), 11, "wrong", "one after the other"),
        slurm("for rate in 1 2; do", f"{TO} {C10D} --rdzv-endpoint=n1:$port train.py --rate $rate || exit 1", "done"),
        *(
            slurm(*loop(change, "pids+=($!)"), WAIT)
            for change in ("rank=$((rank + 1))", "((rank++))", "let rank++", "((rank += 1))")
        ),
    ],
    "one torchrun per machine of PBS": [
        (
            pbs("trap : TERM", f"pbsdsh -- /env/bin/torchrun {ON_PBS} /x/train.py"),
            *(7, "wrong", "pbsdsh starts torchrun 2 times on each machine (mpiprocs=2)"),
        ),
        (pbs(f"{MPIRUN.format(4)} train.py"), 6, "wrong", "mpirun starts torchrun 4 times, for 2 machines"),
        pbs(f"{MPIRUN.format(2)} train.py", select="2:ncpus=8"),
    ],
    "one machine without an address": [
        *(f"torchrun {nodes} --nproc-per-node=4 train.py\n" for nodes in ("", "--nnodes=1", "--standalone")),
        *(
            slurm(f"srun -c 4 -K torchrun --standalone --nnodes={nodes} --nproc_per_node=4 train.py", nodes=1)
            for nodes in ("1", "$SLURM_NNODES", "$SLURM_JOB_NUM_NODES")
        ),
    ],
    "options in an unknown variable": [
        *(slurm(f"srun -c 4 -K torchrun {options} train.py") for options in ("$OPTIONS", '"${OPTIONS[@]}"', '"$@"')),
        slurm("srun $SRUN_OPTIONS python train.py"),
        slurm(PET, "srun -c 4 -K torchrun train.py"),
    ],
    "options in variables of the script": [
        slurm(*lines, f"srun -c 4 -K torchrun {options} train.py")
        for options, *lines in (
            ['"${O[@]}"', f"O=({C10D} --rdzv-endpoint=$(hostname):$PORT)", "O+=(--nnodes=2 --nproc-per-node=4)"],
            ["$O", 'O="--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):$PORT"', 'O="$O --nproc-per-node=4"'],
            ["$O", 'O="--nnodes=2 --rdzv-backend=c10d"', 'O+=" --rdzv-endpoint=$HOST:$PORT"'],
            ["$O", "if true; then O=--standalone; else O='--nnodes=2'; fi", ":"],
        )
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])
