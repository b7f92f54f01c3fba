from job_scripts import findings, one_finding, slurm

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"
HEAD = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
COMPRESSED = ("$(echo $SLURM_JOB_NODELIST | cut -d, -f1)", "${SLURM_NODELIST%%,*}", "$SLURM_JOB_NODELIST")
RANDOM = ("$RANDOM", "$((20000 + RANDOM % 10000))", "$(shuf -i 20000-30000 -n 1)")
RANDOM_ID = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-id={} --rdzv-endpoint=n1:$P train.py"
LAUNCHER = 'L="torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint n1:$MASTER_PORT"'
FIXED = "torchrun --nnodes=2 --node-rank=1 --master-addr=n1 --master-port=29500 train.py\n"
LOCAL = "export MASTER_ADDR=localhost"


def torchrun(endpoint):
    return f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint={endpoint} train.py"


def in_each_task(command):
    return slurm(f"srun {OPTIONS} bash -c '{command}'")


CASES = {
    "is compressed": [
        *((9, slurm(f"export MASTER_ADDR={value}", SRUN), f"MASTER_ADDR={HEAD}") for value in COMPRESSED),
        slurm(f"export MASTER_ADDR={HEAD}", SRUN),
    ],
    "MASTER_ADDR contains the names of all machines": [
        (9, slurm("export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST)", SRUN), f"MASTER_ADDR={HEAD}"),
        slurm("nodes=($(scontrol show hostnames))", "export MASTER_ADDR=${nodes[0]}", SRUN),
    ],
    "its own random value": [
        *((9, in_each_task(RANDOM_ID.format(value))) for value in RANDOM),
        *(slurm(f"srun {OPTIONS} {RANDOM_ID.format(value)}") for value in RANDOM),
    ],
    "each machine runs $(hostname) itself": [
        (9, in_each_task("export MASTER_ADDR=$(hostname); python train.py")),
        (9, in_each_task(f"torchrun {C10D} --rdzv-endpoint=$(hostname):{PORT} train.py")),
        in_each_task(f"torchrun {C10D} --rdzv-endpoint=n1:{PORT} --local-addr=$(hostname) train.py --log $(hostname)"),
    ],
    "the sum exceeds 65535": [(9, slurm("export MASTER_PORT=$((20000 + SLURM_JOB_ID))", SRUN))],
    "with MASTER_ADDR=localhost, each machine waits for the others on itself": [
        (9, slurm(LOCAL, SRUN)),
        slurm(LOCAL, SRUN, nodes=1),
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)


def test_a_local_address_in_the_arguments_of_the_script_is_wrong():
    found = findings(slurm(f"{SRUN} --dist-url tcp://localhost:29500"))
    assert found == [(9, "with tcp://localhost, each machine waits for the others on itself")]
