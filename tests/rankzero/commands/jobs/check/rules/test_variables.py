import pytest

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((f"srun {OPTIONS} python train.py --rank $SLURM_PROCID",), "SLURM_PROCID"),
        ((f'srun {OPTIONS} bash -c "python train.py --rank $SLURM_PROCID"',), "SLURM_PROCID"),
        (("export RANK=$SLURM_PROCID", SRUN), "SLURM_PROCID"),
        (("LOCAL_RANK=${SLURM_LOCALID}", SRUN), "SLURM_LOCALID"),
        (
            (f"srun {OPTIONS} torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 train.py",),
            "SLURM_NODEID",
        ),
    ],
)
def test_the_job_script_replaces_variables_of_tasks(slurm, only, lines, name):
    text = f"the job script replaces ${name} by its own value, 0: all tasks get the same"
    instead = only(slurm(*lines), 9, "wrong", text)
    assert instead == f"srun bash -c '...', with ${name} in the quotes"


@pytest.mark.parametrize(
    "lines",
    [
        (f"srun {OPTIONS} bash -c 'RANK=$SLURM_PROCID python train.py'",),
        (f'srun {OPTIONS} bash -c "python train.py --rank \\$SLURM_PROCID"',),
        ('echo "on $SLURM_NODEID"', SRUN),
        (f"{SRUN} --name $SLURM_JOB_ID",),
        ("task() { export RANK=$SLURM_PROCID; }", SRUN),
    ],
)
def test_variables_that_the_tasks_replace(slurm, findings, lines):
    assert findings(slurm(*lines)) == []


def test_pbs_numbers_the_tasks_only_in_the_tasks(pbs, only):
    torchrun = (
        "pbsdsh -- /env/bin/torchrun --nnodes=2 --node_rank=$PBS_NODENUM --master_addr=n1 --master_port=$P /x/train.py"
    )
    only(
        pbs("trap : TERM", torchrun, select="2:ncpus=8"),
        7,
        "wrong",
        "the job script replaces $PBS_NODENUM by its own value, 0",
    )


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
def test_a_fixed_port_is_one_of_all_jobs(slurm, only, lines, line, port, instead):
    assert only(slurm(*lines), line, "risky", f"two jobs on one machine cannot both use port {port}") == instead


@pytest.mark.parametrize(
    "lines",
    [
        ("export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))", SRUN),
        (f"port={PORT}", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=n1:$port train.py"),
        (f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$ENDPOINT train.py",),
        ("e=$(head -n 1 $FILE):$P", f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$e train.py"),
    ],
)
def test_a_port_that_depends_on_the_job(slurm, findings, lines):
    assert findings(slurm(*lines)) == []


def test_the_port_that_mpirun_passes_on(only):
    only("mpirun -np 2 --bind-to none -x MASTER_PORT=1234 python train.py\n", 1, "risky", "cannot both use port 1234")


def test_rank_zero_is_not_on_the_own_machine_of_each(slurm, only, findings):
    lines = ("export MASTER_ADDR=localhost", SRUN)
    only(slurm(*lines), 9, "wrong", "with MASTER_ADDR=localhost, each machine waits for the others on itself")
    assert findings(slurm(*lines, nodes=1)) == []


@pytest.mark.parametrize("option", ["-i", "-I", "--ip-address"])
def test_an_address_from_hostname_may_be_another_one(slurm, only, option):
    lines = (
        f'a=$(srun -w "$n" hostname {option})',
        f"srun {OPTIONS} torchrun {C10D} --rdzv-endpoint=$a:{PORT} train.py",
    )
    only(slurm(*lines), 9, "risky", "may be 127.0.1.1, or several addresses")


def test_each_machine_runs_a_command_in_the_text_of_a_shell(slurm, only):
    command = f"torchrun {C10D} --rdzv-endpoint=$(hostname):{PORT} train.py"
    only(slurm(f"srun {OPTIONS} bash -c '{command}'"), 9, "wrong", "each machine replaces $(hostname) by its own name")


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_variables_of_mpi_exist_in_its_processes_only(only, findings, name):
    command = "mpirun -np 2 --bind-to none bash -c {0}RANK=${1} python train.py{0}\n"
    only(command.format('"', name), 1, "wrong", f"${name} by its own value, which is empty there")
    assert findings(command.format("'", name)) == []


def test_a_name_of_a_file_may_contain_the_node_of_the_job_script(slurm, findings):
    assert findings(slurm("export LOG=main_$SLURM_NODEID.log", SRUN)) == []


def test_each_machine_may_use_its_own_name_elsewhere(slurm, findings):
    inner = f"torchrun {C10D} --rdzv-endpoint=n1:{PORT} --local-addr=$(hostname) train.py --log $(hostname)"
    assert findings(slurm(f"srun {OPTIONS} bash -c '{inner}'")) == []


def test_an_address_in_the_arguments_of_the_script(slurm, findings):
    found = findings(slurm(f"{SRUN} --dist-url tcp://localhost:29500"))
    assert [text for _, level, text in found] == [
        "with tcp://localhost, each machine waits for the others on itself",
        "two jobs on one machine cannot both use port 29500",
    ]


def test_a_port_in_a_variable_is_reported_once(slurm, only):
    lines = ("export MASTER_PORT=6000", 'L="torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint n1:$MASTER_PORT"')
    only(slurm(*lines, f"srun {OPTIONS} $L train.py"), 9, "risky", "cannot both use port 6000")


def test_without_a_scheduler_another_port_has_to_be_chosen(only):
    text = "torchrun --nnodes=2 --node-rank=1 --master-addr=n1 --master-port=29500 train.py\n"
    assert only(text, 1, "risky", "cannot both use port 29500") == "a port that no other job uses"
