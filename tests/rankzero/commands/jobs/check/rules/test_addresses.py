import pytest

from job_scripts import findings, slurm, verify

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"
HEAD = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
RANDOM = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-id={} --rdzv-endpoint=n1:$P train.py"
LAUNCHER = 'L="torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint n1:$MASTER_PORT"'
FIXED = "torchrun --nnodes=2 --node-rank=1 --master-addr=n1 --master-port=29500 train.py\n"


def torchrun(endpoint):
    return f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint={endpoint} train.py"


def in_each_task(command):
    return slurm(f"srun {OPTIONS} bash -c '{command}'")


CASES = {
    "a list of names is no address": [
        *(
            (slurm(f"export MASTER_ADDR={value}", SRUN), 9, "wrong", found, f"MASTER_ADDR={HEAD}")
            for value, found in (
                ("$(echo $SLURM_JOB_NODELIST | cut -d, -f1)", "is compressed"),
                ("${SLURM_NODELIST%%,*}", "is compressed"),
                ("$SLURM_JOB_NODELIST", "is compressed"),
                ("$(scontrol show hostnames $SLURM_JOB_NODELIST)", "MASTER_ADDR contains the names of all machines"),
            )
        ),
        slurm(f"export MASTER_ADDR={HEAD}", SRUN),
        slurm("nodes=($(scontrol show hostnames))", "export MASTER_ADDR=${nodes[0]}", SRUN),
    ],
    "a random value in each task": [
        case
        for value in ("$RANDOM", "$((20000 + RANDOM % 10000))", "$(shuf -i 20000-30000 -n 1)")
        for case in (
            (in_each_task(RANDOM.format(value)), 9, "wrong", "its own random value"),
            slurm(f"srun {OPTIONS} {RANDOM.format(value)}"),
        )
    ],
    "the name of each machine as its master": [
        *(
            (in_each_task(command), 9, "wrong", "each machine runs $(hostname) itself")
            for command in (
                "export MASTER_ADDR=$(hostname); python train.py",
                f"torchrun {C10D} --rdzv-endpoint=$(hostname):{PORT} train.py",
            )
        ),
        in_each_task(f"torchrun {C10D} --rdzv-endpoint=n1:{PORT} --local-addr=$(hostname) train.py --log $(hostname)"),
    ],
    "a fixed port": [
        *(
            (slurm(*lines), line, "risky", f"two jobs on one machine cannot both use port {port}", instead)
            for lines, line, port, instead in (
                (("export MASTER_PORT=29500", SRUN), 9, 29500, PORT),
                (("export MASTER_PORT=29500", SRUN, SRUN), 9, 29500, PORT),
                ((torchrun("n1:1234"),), 9, 1234, f"n1:{PORT}"),
                ((torchrun("n1"),), 9, 29400, f"n1:{PORT}"),
                (("a=$(hostname)", torchrun("$a")), 10, 29400, f"$a:{PORT}"),
                (("a=n1:29400", torchrun("$a")), 9, 29400, f"n1:{PORT}"),
                (("MASTER_PORT=5", torchrun("n1:$MASTER_PORT")), 9, 5, PORT),
            )
        ),
        (slurm("export MASTER_PORT=$((20000 + SLURM_JOB_ID))", SRUN), 9, "wrong", "the sum exceeds 65535"),
        ("mpirun -np 2 --bind-to none -x MASTER_PORT=1234 python train.py\n", 1, "risky", "cannot both use port 1234"),
        (FIXED, 1, "risky", "cannot both use port 29500", "a port that no other job uses"),
        (  # once
            slurm("export MASTER_PORT=6000", LAUNCHER, f"srun {OPTIONS} $L train.py"),
            *(9, "risky", "cannot both use port 6000"),
        ),
        slurm("export MASTER_PORT=29500", SRUN, exclusive=""),
        slurm("export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))", SRUN),
        slurm(f"port={PORT}", torchrun("n1:$port")),
        slurm(torchrun("$ENDPOINT")),
        slurm("e=$(head -n 1 $FILE):$P", torchrun("$e")),
    ],
    "a local address on several machines": [
        (
            slurm("export MASTER_ADDR=localhost", SRUN),
            *(9, "wrong", "with MASTER_ADDR=localhost, each machine waits for the others on itself"),
        ),
        slurm("export MASTER_ADDR=localhost", SRUN, nodes=1),
    ],
    "the addresses that hostname prints": [
        (
            slurm(f'a=$(srun -w "$n" hostname {option})', torchrun(f"$a:{PORT}")),
            *(9, "risky", "may be 127.0.1.1, or several addresses"),
        )
        for option in ("-i", "-I", "--ip-address")
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])


def test_a_local_address_in_the_arguments_of_the_script_is_wrong():
    found = findings(slurm(f"{SRUN} --dist-url tcp://localhost:29500"))
    assert [text for _, level, text in found] == [
        "with tcp://localhost, each machine waits for the others on itself",
        "two jobs on one machine cannot both use port 29500",
    ]
