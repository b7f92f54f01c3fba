import pytest

from job_scripts import findings, only, pbs, slurm

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((f"srun {OPTIONS} python train.py --rank $SLURM_PROCID",), "SLURM_PROCID"),
        (("export RANK=$SLURM_PROCID", SRUN), "SLURM_PROCID"),
        (("LOCAL_RANK=${SLURM_LOCALID}", SRUN), "SLURM_LOCALID"),
        *(
            ((f"export {name}=$SLURM_LOCALID", SRUN), "SLURM_LOCALID")
            for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LOCAL_RANK", "MY_NODE_ID")
        ),
        (
            (f"srun {OPTIONS} torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 train.py",),
            "SLURM_NODEID",
        ),
    ],
)
def test_a_task_variable_that_the_job_script_expands_is_wrong(lines, name):
    text = f"the job script expands ${name} itself, to 0, so that all tasks get the same value"
    instead = only(slurm(*lines), 9, "wrong", text)
    assert instead == f"srun bash -c '...', with ${name} in the quotes"


def test_pbs_numbers_the_tasks_only_in_the_tasks():
    options = "--nnodes=2 --node_rank=$PBS_NODENUM --master_addr=n1 --master_port=$P"
    text = pbs("trap : TERM", f"pbsdsh -- /env/bin/torchrun {options} /x/train.py", select="2:ncpus=8")
    only(text, 7, "wrong", "the job script expands $PBS_NODENUM itself, to 0")


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_variables_of_mpi_exist_in_its_processes_only(name):
    command = "mpirun -np 2 --bind-to none bash -c {0}RANK=${1} python train.py{0}\n"
    only(command.format('"', name), 1, "wrong", f"the job script expands ${name} itself, to an empty string")
    assert findings(command.format("'", name)) == []


def test_a_variable_in_double_quotes_of_bash_is_escaped():
    text = slurm(f'srun {OPTIONS} bash -c "python train.py --rank $SLURM_PROCID"')
    assert only(text, 9, "wrong", "$SLURM_PROCID itself") == "\\$SLURM_PROCID, which bash -c expands in each task"


def test_variables_that_the_quoted_text_needs_are_exported():
    torchrun = "torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD --master_port=$P train.py"
    head = "HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    instead = only(slurm(head, f"srun {OPTIONS} {torchrun}"), 10, "wrong", "$SLURM_NODEID itself")
    assert instead == "export HEAD, and srun bash -c '...', with $SLURM_NODEID in the quotes"


@pytest.mark.parametrize(
    "command", [SRUN, f"srun {OPTIONS} bash -c 'torchrun --nnodes=2 {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py'"]
)
def test_a_variable_that_is_not_exported_is_wrong(command):
    instead = only(slurm("MASTER_ADDR=n1", command), 9, "wrong", "MASTER_ADDR is not exported")
    assert instead == "export MASTER_ADDR=n1"
    for lines in (["export MASTER_ADDR=n1"], ["MASTER_ADDR=n1", "export MASTER_ADDR"], ["set -a", "MASTER_ADDR=n1"]):
        assert findings(slurm(*lines, command)) == []


@pytest.mark.parametrize("end", ["EOF", "'EOF'", '"EOF"', "\\EOF"])
def test_a_here_document_expands_variables_unless_its_end_is_quoted(end):
    lines = (f"cat >task.sh <<{end}", "export RANK=$SLURM_PROCID", "EOF", f"srun {OPTIONS} ./task.sh")
    found = findings(slurm(*lines))
    assert [item[:2] for item in found] == ([(9, "wrong")] if end == "EOF" else [])
    escaped = [line.replace("$", "\\$") for line in lines]
    assert findings(slurm(*escaped)) == []


CORRECT = {
    "variables that the tasks expand": [
        slurm(f"srun {OPTIONS} bash -c 'RANK=$SLURM_PROCID python train.py'"),
        slurm(f'srun {OPTIONS} bash -c "python train.py --rank \\$SLURM_PROCID"'),
        slurm('echo "on $SLURM_NODEID"', SRUN),
        slurm(f"{SRUN} --name $SLURM_JOB_ID"),
        slurm("task() { export RANK=$SLURM_PROCID; }", SRUN),
        slurm(f"srun {OPTIONS} bash -c 'python train.py --rank $SLURM_PROCID' <<EOF", "x", "EOF"),
    ],
    "the node of the job script in the name of a file": [slurm("export LOG=main_$SLURM_NODEID.log", SRUN)],
    "a node rank that torchrun ignores": [
        slurm(
            f"srun {OPTIONS} torchrun --nnodes=2 --node_rank=$SLURM_NODEID"
            f" --rdzv_backend={backend} --rdzv_endpoint=n1:$P train.py"
        )
        for backend in ("c10d", "etcd-v2")
    ],
    "a variable that the job script expands": [
        slurm("MASTER_ADDR=n1", f"srun {OPTIONS} {command}")
        for command in (
            f'bash -c "torchrun {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py"',
            f"torchrun {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py",
            "python train.py --address $MASTER_ADDR",
            "--export=ALL,MASTER_ADDR=n1 python train.py",
        )
    ],
    "inherited and inner variables": [
        slurm("PATH=$HOME/bin:$PATH", f"srun {OPTIONS} bash -c 'python train.py --path $PATH'"),
        slurm("SEED=1", f"srun {OPTIONS} bash -c 'SEED=3; python train.py --seed $SEED'"),
    ],
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_finding(name):
    assert [findings(text) for text in CORRECT[name]] == [[]] * len(CORRECT[name])
