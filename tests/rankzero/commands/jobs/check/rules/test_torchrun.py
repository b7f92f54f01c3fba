import pytest

from job_scripts import findings, only, pbs, slurm

TO = "srun --cpus-per-task=4 --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=4"
C10D = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
SAME_RANK = "srun starts torchrun with node rank 0 on every machine"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", "without an address, each of the 2 machines waits for the others on itself"),
        (C10D, "without an address"),
        ("--standalone", "--standalone ignores the other machines"),
        (f"{C10D} --rdzv-endpoint=localhost:0", "at localhost:0, each machine waits for the others on itself"),
        (f"{C10D} --rdzv-endpoint=localhost:$PORT", "at localhost:$PORT, each machine waits for the others on itself"),
        (f"--node_rank=$RANK --master_addr=127.0.0.1 --master_port={PORT}", "at 127.0.0.1, each machine waits"),
        (f"--master_addr=$host --master_port={PORT}", "without --node-rank, every machine has node rank 0"),
        (f"--node_rank=0 --master_addr=$host --master_port={PORT}", SAME_RANK),
        (f"--node_rank $NODE_RANK --master_addr=$host --master_port={PORT}", SAME_RANK),
    ],
)
def test_machines_that_cannot_find_each_other(options, found):
    only(slurm("host=$(hostname)", "NODE_RANK=0", f"{TO} {options} train.py"), 11, "wrong", found)


def test_the_old_launcher_is_deprecated():
    line = "python3 -u -m torch.distributed.launch --nproc_per_node=2 train.py"
    instead = only(f"{line}\n", 1, "risky", "is deprecated, and adds --local-rank to the arguments of the script")
    assert instead == "torchrun --nproc_per_node=2 train.py"
    line = "python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py"
    assert only(f"{line}\n", 1, "risky", "is deprecated") == instead


def pair(end):
    line = "torchrun --nnodes=2 --node_rank={} --master_addr=n1 --master_port=$PORT train.py"
    return "".join(f"{line.format(rank)}{end}\n" for rank in range(2))


def test_commands_for_two_machines_cannot_run_one_after_the_other():
    only(pair(""), 1, "wrong", "node rank 0 waits for node rank 1, whose command starts after this one has ended")
    assert findings(pair(" &") + "wait\n") == []
    line = "ssh n{} torchrun --nnodes=2 --node_rank={} --master_addr=n1 --master_port=$PORT train.py &\n"
    assert findings("".join(line.format(rank + 1, rank) for rank in range(2)) + "wait\n") == []


@pytest.mark.parametrize("options", ["", "--standalone", "--nnodes=1"])
def test_each_machine_trains_alone_without_the_number_of_machines(options):
    command = f"srun --cpus-per-task=4 --kill-on-bad-exit=1 torchrun {options} --nproc-per-node=4 train.py"
    only(slurm(command), 9, "wrong", "torchrun without --nnodes: each machine trains alone")
    assert findings(slurm(command, nodes=1)) == []
    assert findings(slurm(command.replace("srun ", "srun --nodes=1 "))) == []


@pytest.mark.parametrize("start", ["srun -c 4 -K -N1 -n1 -w ${n[$i]}", "ssh ${n[$i]}"])
def test_a_loop_over_machines_that_waits_for_each(start):
    command = f"{start} torchrun --nnodes=2 --node_rank=$i --master_addr=n1 --master_port=$port train.py"
    only(slurm("for i in 0 1; do", command, "done"), 10, "wrong", "the loop starts the machines one after the other")


def test_one_torchrun_per_machine_of_pbs():
    options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$port"
    pbsdsh = f"pbsdsh -- /env/bin/torchrun {options} /x/train.py"
    only(pbs("trap : TERM", pbsdsh), 7, "wrong", "pbsdsh starts torchrun 2 times on each machine (mpiprocs=2)")
    start = 'mpirun -np {} --hostfile "$PBS_NODEFILE" --map-by ppr:1:node --bind-to none'
    mpirun = f"{start} torchrun {options} train.py"
    only(pbs(mpirun.format(4)), 6, "wrong", "mpirun starts torchrun 4 times, for 2 machines")
    assert findings(pbs(mpirun.format(2), select="2:ncpus=8")) == []


def loop(*end):
    """Returns a loop over machines, with these lines at its end."""
    options = "--nnodes=2 --node_rank=$rank --master_addr=n1 --master_port=$P"
    srun = f"srun -c 4 -K -N1 -n1 -w $host torchrun {options} train.py &"
    return ("rank=0", "for host in $(scontrol show hostnames); do", srun, *end, "done")


def test_a_wait_in_the_loop_starts_the_machines_in_sequence():
    assert "one after the other" in str(findings(slurm(*loop("wait $! || exit", "((rank++))"))))


BASH = f"torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 --master_port={PORT} train.py"
WAIT = 'for pid in "${pids[@]}"; do wait "$pid" || exit; done'
PET = "export PET_NNODES=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=n1:$P"

CORRECT = {
    "a correct rendezvous": [
        slurm("host=$(hostname)", f"{TO} {C10D} --rdzv-endpoint=$host:{PORT} train.py"),
        slurm(f"srun --cpus-per-task=4 -K1 bash -c '{BASH}'"),
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
    "a loop over experiments": [
        slurm("for rate in 1 2; do", f"{TO} {C10D} --rdzv-endpoint=n1:$port train.py --rate $rate || exit 1", "done")
    ],
    "a rank that a loop changes": [
        slurm(*loop(change, "pids+=($!)"), WAIT)
        for change in ("rank=$((rank + 1))", "((rank++))", "let rank++", "((rank += 1))")
    ],
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_finding(name):
    assert [findings(text) for text in CORRECT[name]] == [[]] * len(CORRECT[name])
