from job_scripts import one_finding, pbs, slurm

START = "srun --cpus-per-task=4 --kill-on-bad-exit=1 torchrun"
TO = f"{START} --nnodes=2 --nproc-per-node=4"
C10D = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"
ADDRESS = f"--master_addr=$host --master_port={PORT}"
OLD = "-m torch.distributed.launch {}--nproc_per_node=2 train.py\n"
NEW = "torchrun --nproc_per_node=2 train.py"
RANKED = "torchrun --nnodes=2 --node_rank={} --master_addr=n1 --master_port=$PORT train.py"
BASH = f"torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 --master_port={PORT} train.py"
WAIT = 'for pid in "${pids[@]}"; do wait "$pid" || exit; done'
PET = "export PET_NNODES=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=n1:$P"
ALONE = [f"{START} {options} --nproc-per-node=4 train.py" for options in ("", "--standalone", "--nnodes=1")]
ON_PBS = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$port"
MPIRUN = 'mpirun -np {} --hostfile "$PBS_NODEFILE" --map-by ppr:1:node --bind-to none torchrun ' + ON_PBS


def on_two(options):
    """Returns a script that starts torchrun with these options on two machines, in line 11."""
    return slurm("host=$(hostname)", "NODE_RANK=0", f"{TO} {options} train.py")


def loop(*end):
    """Returns a loop over machines, with these lines at its end."""
    srun = f"srun -c 4 -K -N1 -n1 -w $host {RANKED.format('$rank')} &"
    return ("rank=0", "for host in $(scontrol show hostnames); do", srun, *end, "done")


CASES = {
    "without an address, each of the 2 machines waits for the others on itself": [
        (11, on_two("")),
        (11, on_two(C10D)),
        on_two(f"{C10D} --rdzv-endpoint=$host:{PORT}"),
        slurm(f"srun --cpus-per-task=4 -K1 bash -c '{BASH}'"),
        *(f"torchrun {nodes} --nproc-per-node=4 train.py\n" for nodes in ("", "--nnodes=1", "--standalone")),
        *(
            slurm(f"srun -c 4 -K torchrun --standalone --nnodes={nodes} --nproc_per_node=4 train.py", nodes=1)
            for nodes in ("1", "$SLURM_NNODES", "$SLURM_JOB_NUM_NODES")
        ),
    ],
    "--standalone ignores the other machines": [(11, on_two("--standalone"))],
    **{
        f"at {address}, each machine waits for the others on itself": [(11, on_two(options))]
        for address, options in {
            "localhost:0": f"{C10D} --rdzv-endpoint=localhost:0",
            "localhost:$PORT": f"{C10D} --rdzv-endpoint=localhost:$PORT",
            "127.0.0.1": f"--node_rank=$RANK --master_addr=127.0.0.1 --master_port={PORT}",
        }.items()
    },
    "without --node-rank, every machine has node rank 0": [(11, on_two(ADDRESS))],
    "srun starts torchrun with node rank 0 on every machine": [
        (11, on_two(f"--node_rank=0 {ADDRESS}")),
        (11, on_two(f"--node_rank $NODE_RANK {ADDRESS}")),
    ],
    "node rank 0 waits for node rank 1, whose command starts after this one has ended": [
        (1, f"{RANKED.format(0)}\n{RANKED.format(1)}\n"),
        f"{RANKED.format(0)} &\n{RANKED.format(1)} &\nwait\n",
        f"ssh n1 {RANKED.format(0)} &\nssh n2 {RANKED.format(1)} &\nwait\n",
    ],
    "torchrun without --nnodes: each machine trains alone": [
        *((9, slurm(command)) for command in ALONE),
        *(slurm(command, nodes=1) for command in ALONE),
        *(slurm(command.replace("srun ", "srun --nodes=1 ")) for command in ALONE),
    ],
    "the loop starts the machines one after the other": [
        *(
            (10, slurm("for i in 0 1; do", f"{start} {RANKED.format('$i')}", "done"))
            for start in ("srun -c 4 -K -N1 -n1 -w ${n[$i]}", "ssh ${n[$i]}")
        ),
        (11, slurm(*loop("wait $! || exit", "((rank++))"))),
        slurm("for rate in 1 2; do", f"{TO} {C10D} --rdzv-endpoint=n1:$port train.py --rate $rate || exit 1", "done"),
        *(
            slurm(*loop(change, "pids+=($!)"), WAIT)
            for change in ("rank=$((rank + 1))", "((rank++))", "let rank++", "((rank += 1))")
        ),
    ],
    "pbsdsh starts torchrun 2 times on each machine (mpiprocs=2)": [
        (7, pbs("trap : TERM", f"pbsdsh -- /env/bin/torchrun {ON_PBS} /x/train.py"))
    ],
    "mpirun starts torchrun 4 times, for 2 machines": [
        (6, pbs(f"{MPIRUN.format(4)} train.py")),
        pbs(f"{MPIRUN.format(2)} train.py", select="2:ncpus=8"),
    ],
    "correct: options in an unknown variable": [
        *(slurm(f"srun -c 4 -K torchrun {options} train.py") for options in ("$OPTIONS", '"${OPTIONS[@]}"', '"$@"')),
        slurm("srun $SRUN_OPTIONS python train.py"),
        slurm(PET, "srun -c 4 -K torchrun train.py"),
    ],
    "correct: options in variables of the script": [
        slurm(*lines, f"srun -c 4 -K torchrun {options} train.py")
        for options, *lines in (
            ['"${O[@]}"', f"O=({C10D} --rdzv-endpoint=$(hostname):$PORT)", "O+=(--nnodes=2 --nproc-per-node=4)"],
            ["$O", 'O="--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):$PORT"', 'O="$O --nproc-per-node=4"'],
            ["$O", 'O="--nnodes=2 --rdzv-backend=c10d"', 'O+=" --rdzv-endpoint=$HOST:$PORT"'],
            ["$O", "if true; then O=--standalone; else O='--nnodes=2'; fi", ":"],
        )
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)
