import pytest

from job_scripts import findings, only, slurm

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"
HEAD = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("$(echo $SLURM_JOB_NODELIST | cut -d, -f1)", "is compressed"),
        ("${SLURM_NODELIST%%,*}", "is compressed"),
        ("$SLURM_JOB_NODELIST", "is compressed"),
        ("$(scontrol show hostnames $SLURM_JOB_NODELIST)", "MASTER_ADDR contains the names of all machines"),
    ],
)
def test_a_list_of_names_is_no_address(value, found):
    only(slurm(f"export MASTER_ADDR={value}", SRUN), 9, "wrong", found, f"MASTER_ADDR={HEAD}")


@pytest.mark.parametrize("value", ["$RANDOM", "$((20000 + RANDOM % 10000))", "$(shuf -i 20000-30000 -n 1)"])
def test_a_random_value_in_each_task_is_wrong(value):
    torchrun = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-id={} --rdzv-endpoint=n1:$P train.py"
    only(slurm(f"srun {OPTIONS} bash -c '{torchrun.format(value)}'"), 9, "wrong", "its own random value")
    assert findings(slurm(f"srun {OPTIONS} {torchrun.format(value)}")) == []


@pytest.mark.parametrize(
    "command",
    [
        "export MASTER_ADDR=$(hostname); python train.py",
        f"torchrun {C10D} --rdzv-endpoint=$(hostname):{PORT} train.py",
    ],
)
def test_the_name_of_each_machine_as_its_master_is_wrong(command):
    only(slurm(f"srun {OPTIONS} bash -c '{command}'"), 9, "wrong", "each machine runs $(hostname) itself")


@pytest.mark.parametrize(
    ("lines", "line", "port", "instead"),
    [
        (("export MASTER_PORT=29500", SRUN), 9, 29500, PORT),
        (("export MASTER_PORT=29500", SRUN, SRUN), 9, 29500, PORT),
        ((f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=n1:1234 train.py",), 9, 1234, f"n1:{PORT}"),
        ((f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=n1 train.py",), 9, 29400, f"n1:{PORT}"),
        (("a=$(hostname)", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$a train.py"), 10, 29400, f"$a:{PORT}"),
        (("a=n1:29400", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$a train.py"), 9, 29400, f"n1:{PORT}"),
        (("MASTER_PORT=5", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=n1:$MASTER_PORT train.py"), 9, 5, PORT),
    ],
)
def test_a_fixed_port_is_risky(lines, line, port, instead):
    assert only(slurm(*lines), line, "risky", f"two jobs on one machine cannot both use port {port}") == instead


def test_a_local_master_addr_on_several_machines_is_wrong():
    lines = ("export MASTER_ADDR=localhost", SRUN)
    only(slurm(*lines), 9, "wrong", "with MASTER_ADDR=localhost, each machine waits for the others on itself")
    assert findings(slurm(*lines, nodes=1)) == []


@pytest.mark.parametrize("option", ["-i", "-I", "--ip-address"])
def test_the_addresses_that_hostname_prints_are_risky(option):
    lines = (
        f'a=$(srun -w "$n" hostname {option})',
        f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$a:{PORT} train.py",
    )
    only(slurm(*lines), 9, "risky", "may be 127.0.1.1, or several addresses")


def test_a_local_address_in_the_arguments_of_the_script_is_wrong():
    found = findings(slurm(f"{SRUN} --dist-url tcp://localhost:29500"))
    assert [text for _, level, text in found] == [
        "with tcp://localhost, each machine waits for the others on itself",
        "two jobs on one machine cannot both use port 29500",
    ]


def test_other_ports_that_two_jobs_cannot_both_use():
    only(slurm("export MASTER_PORT=$((20000 + SLURM_JOB_ID))", SRUN), 9, "wrong", "the sum exceeds 65535")
    only("mpirun -np 2 --bind-to none -x MASTER_PORT=1234 python train.py\n", 1, "risky", "cannot both use port 1234")
    torchrun = "torchrun --nnodes=2 --node-rank=1 --master-addr=n1 --master-port=29500 train.py\n"
    only(torchrun, 1, "risky", "cannot both use port 29500", "a port that no other job uses")
    lines = ("export MASTER_PORT=6000", 'L="torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint n1:$MASTER_PORT"')
    only(slurm(*lines, f"srun {OPTIONS} $L train.py"), 9, "risky", "cannot both use port 6000")  # once


CORRECT = {
    "an address from a list of names": [
        slurm(f"export MASTER_ADDR={HEAD}", SRUN),
        slurm("nodes=($(scontrol show hostnames))", "export MASTER_ADDR=${nodes[0]}", SRUN),
    ],
    "a port that depends on the job": [
        slurm("export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))", SRUN),
        slurm(f"port={PORT}", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=n1:$port train.py"),
        slurm(f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$ENDPOINT train.py"),
        slurm("e=$(head -n 1 $FILE):$P", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$e train.py"),
    ],
    "a fixed port in an exclusive job": [slurm("export MASTER_PORT=29500", SRUN, exclusive="")],
    "the name of each machine elsewhere": [
        slurm(
            f"srun {OPTIONS} bash -c 'torchrun {C10D} --rdzv-endpoint=n1:{PORT}"
            " --local-addr=$(hostname) train.py --log $(hostname)'"
        )
    ],
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_finding(name):
    assert [findings(text) for text in CORRECT[name]] == [[]] * len(CORRECT[name])
