import pytest

from job_scripts import findings, pbs, slurm, verify

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
NODE = "torchrun --nnodes=2 --node_rank={} --master_addr={} --master_port=$P"
MPI = "mpirun -np 2 --bind-to none bash -c {0}RANK=${1} python train.py{0}\n"
HEAD = "HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
EXPORTS = (["export MASTER_ADDR=n1"], ["MASTER_ADDR=n1", "export MASTER_ADDR"], ["set -a", "MASTER_ADDR=n1"])

CASES = {
    "a task variable that the job script expands": [
        *(
            (
                slurm(*lines),
                *(9, "wrong", f"the job script expands ${name} itself, to 0, so that all tasks get the same value"),
                f"srun bash -c '...', with ${name} in the quotes",
            )
            for name, *lines in (
                ("SLURM_PROCID", f"{SRUN} --rank $SLURM_PROCID"),
                ("SLURM_PROCID", "export RANK=$SLURM_PROCID", SRUN),
                ("SLURM_LOCALID", "LOCAL_RANK=${SLURM_LOCALID}", SRUN),
                *(
                    ("SLURM_LOCALID", f"export {variable}=$SLURM_LOCALID", SRUN)
                    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LOCAL_RANK", "MY_NODE_ID")
                ),
                (
                    "SLURM_NODEID",
                    f"srun {OPTIONS} torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 train.py",
                ),
            )
        ),
        (
            slurm(f'srun {OPTIONS} bash -c "python train.py --rank $SLURM_PROCID"'),
            *(9, "wrong", "$SLURM_PROCID itself", "\\$SLURM_PROCID, which bash -c expands in each task"),
        ),
        (
            slurm(HEAD, f"srun {OPTIONS} {NODE.format('$SLURM_NODEID', '$HEAD')} train.py"),
            *(10, "wrong", "$SLURM_NODEID itself"),
            "export HEAD, and srun bash -c '...', with $SLURM_NODEID in the quotes",
        ),
        (
            pbs(
                *("trap : TERM", f"pbsdsh -- /env/bin/{NODE.format('$PBS_NODENUM', 'n1')} /x/train.py"),
                select="2:ncpus=8",
            ),
            *(7, "wrong", "the job script expands $PBS_NODENUM itself, to 0"),
        ),
        slurm(f"srun {OPTIONS} bash -c 'RANK=$SLURM_PROCID python train.py'"),
        slurm(f'srun {OPTIONS} bash -c "python train.py --rank \\$SLURM_PROCID"'),
        slurm('echo "on $SLURM_NODEID"', SRUN),
        slurm(f"{SRUN} --name $SLURM_JOB_ID"),
        slurm("task() { export RANK=$SLURM_PROCID; }", SRUN),
        slurm(f"srun {OPTIONS} bash -c 'python train.py --rank $SLURM_PROCID' <<EOF", "x", "EOF"),
        slurm("export LOG=main_$SLURM_NODEID.log", SRUN),  # the node of the job script
        *(
            slurm(
                f"srun {OPTIONS} torchrun --nnodes=2 --node_rank=$SLURM_NODEID"  # which torchrun ignores
                f" --rdzv_backend={backend} --rdzv_endpoint=n1:$P train.py"
            )
            for backend in ("c10d", "etcd-v2")
        ),
    ],
    "variables of MPI exist in its processes only": [
        case
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
        for case in (
            (MPI.format('"', name), 1, "wrong", f"the job script expands ${name} itself, to an empty string"),
            MPI.format("'", name),
        )
    ],
    "a variable that is not exported": [
        *(
            case
            for command in (
                SRUN,
                f"srun {OPTIONS} bash -c 'torchrun --nnodes=2 {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py'",
            )
            for case in (
                (
                    slurm("MASTER_ADDR=n1", command),
                    *(9, "wrong", "MASTER_ADDR is not exported", "export MASTER_ADDR=n1"),
                ),
                *(slurm(*lines, command) for lines in EXPORTS),
            )
        ),
        *(
            slurm("MASTER_ADDR=n1", f"srun {OPTIONS} {command}")
            for command in (
                f'bash -c "torchrun {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py"',
                f"torchrun {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py",
                "python train.py --address $MASTER_ADDR",
                "--export=ALL,MASTER_ADDR=n1 python train.py",
            )
        ),
        slurm("PATH=$HOME/bin:$PATH", f"srun {OPTIONS} bash -c 'python train.py --path $PATH'"),
        slurm("SEED=1", f"srun {OPTIONS} bash -c 'SEED=3; python train.py --seed $SEED'"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])


@pytest.mark.parametrize("end", ["EOF", "'EOF'", '"EOF"', "\\EOF"])
def test_a_here_document_expands_variables_unless_its_end_is_quoted(end):
    lines = (f"cat >task.sh <<{end}", "export RANK=$SLURM_PROCID", "EOF", f"srun {OPTIONS} ./task.sh")
    assert [item[:2] for item in findings(slurm(*lines))] == ([(9, "wrong")] if end == "EOF" else [])
    assert findings(slurm(*(line.replace("$", "\\$") for line in lines))) == []
