import pytest

from job_scripts import findings, one_finding, pbs, slurm

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
NODE = "torchrun --nnodes=2 --node_rank={} --master_addr={} --master_port=$P"
NODE_RANK = f"srun {OPTIONS} torchrun --nnodes=2 --node_rank=$SLURM_NODEID"
MPI = "mpirun -np 2 --bind-to none bash -c {0}RANK=${1} python train.py{0}\n"
HEAD = "HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
PBSDSH = f"pbsdsh -- /env/bin/{NODE.format('$PBS_NODENUM', 'n1')} /x/train.py"
BASH = f"srun {OPTIONS} bash -c 'torchrun --nnodes=2 {C10D} --rdzv-endpoint=$MASTER_ADDR:$P train.py'"
EXPANDED = "the job script expands ${} itself, to 0, so that all tasks get the same value"
IN_QUOTES = "srun bash -c '...', with ${} in the quotes"
ESCAPED = "\\$SLURM_PROCID, which bash -c expands in each task"
EXPORTED = "export HEAD, and srun bash -c '...', with $SLURM_NODEID in the quotes"
EXPORTS = (["export MASTER_ADDR=n1"], ["MASTER_ADDR=n1", "export MASTER_ADDR"], ["set -a", "MASTER_ADDR=n1"])
GPU_NAMES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LOCAL_RANK", "MY_NODE_ID")
RANK = "python train.py --rank "

CASES = {
    EXPANDED.format("SLURM_PROCID"): [
        (9, slurm(f"{SRUN} --rank $SLURM_PROCID"), IN_QUOTES.format("SLURM_PROCID")),
        (9, slurm("export RANK=$SLURM_PROCID", SRUN), IN_QUOTES.format("SLURM_PROCID")),
        slurm(f"srun {OPTIONS} bash -c 'RANK=$SLURM_PROCID python train.py'"),
        slurm(f'srun {OPTIONS} bash -c "{RANK}\\$SLURM_PROCID"'),
        slurm('echo "on $SLURM_NODEID"', SRUN),
        slurm(f"{SRUN} --name $SLURM_JOB_ID"),
        slurm("task() { export RANK=$SLURM_PROCID; }", SRUN),
        slurm(f"srun {OPTIONS} bash -c '{RANK}$SLURM_PROCID' <<EOF", "x", "EOF"),
    ],
    EXPANDED.format("SLURM_LOCALID"): [
        (9, slurm("LOCAL_RANK=${SLURM_LOCALID}", SRUN), IN_QUOTES.format("SLURM_LOCALID")),
        *((9, slurm(f"export {name}=$SLURM_LOCALID", SRUN), IN_QUOTES.format("SLURM_LOCALID")) for name in GPU_NAMES),
    ],
    EXPANDED.format("SLURM_NODEID"): [
        (9, slurm(f"{NODE_RANK} --master_addr=n1 train.py"), IN_QUOTES.format("SLURM_NODEID")),
        slurm("export LOG=main_$SLURM_NODEID.log", SRUN),  # the node of the job script
        # torchrun ignores this node rank
        *(slurm(f"{NODE_RANK} --rdzv_backend={name} --rdzv_endpoint=n1:$P train.py") for name in ("c10d", "etcd-v2")),
    ],
    "$SLURM_PROCID itself": [(9, slurm(f'srun {OPTIONS} bash -c "{RANK}$SLURM_PROCID"'), ESCAPED)],
    "$SLURM_NODEID itself": [
        (10, slurm(HEAD, f"srun {OPTIONS} {NODE.format('$SLURM_NODEID', '$HEAD')} train.py"), EXPORTED)
    ],
    "the job script expands $PBS_NODENUM itself, to 0": [(7, pbs("trap : TERM", PBSDSH, select="2:ncpus=8"))],
    **{
        f"the job script expands ${name} itself, to an empty string": [
            (1, MPI.format('"', name)),
            MPI.format("'", name),
        ]
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    },
    "MASTER_ADDR is not exported": [
        *((9, slurm("MASTER_ADDR=n1", command), "export MASTER_ADDR=n1") for command in (SRUN, BASH)),
        *(slurm(*lines, command) for command in (SRUN, BASH) for lines in EXPORTS),
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

test_the_only_finding_in_a_script = one_finding(CASES)


@pytest.mark.parametrize("end", ["EOF", "'EOF'", '"EOF"', "\\EOF"])
def test_a_here_document_expands_variables_unless_its_end_is_quoted(end):
    lines = (f"cat >task.sh <<{end}", "export RANK=$SLURM_PROCID", "EOF", f"srun {OPTIONS} ./task.sh")
    assert [line for line, _ in findings(slurm(*lines))] == ([9] if end == "EOF" else [])
    assert findings(slurm(*(line.replace("$", "\\$") for line in lines))) == []
