import pytest

from job_scripts import slurm, verify

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py"
ONE = TORCHRUN.replace("--rdzv_backend=c10d --rdzv_endpoint=n1:$P", "--node_rank=$i --master_addr=n1 --master_port=$P")
APPTAINER = f"srun {OPTIONS} apptainer exec {{}} x.sif python train.py"
OWN_GPU = "each task sees only its own GPU"
CORES = "srun does not inherit --cpus-per-task"
NO_PATH = "the tasks do not get PATH"
GPU_REQUESTS = ({"gres": "gpu:4"}, {"gres": "nvme:200,gpu:v100:4,disk:9"}, {"gpus_per_node": "a100:4"}, {"gpus": 8})

CASES = {
    "without srun, one process starts": [
        *(
            (
                slurm("python train.py --epochs 3", **directives),
                *(9, "wrong", f"one process starts, on the first node, in a job of {size}"),
                "srun --kill-on-bad-exit=1 --cpus-per-task=4 python train.py --epochs 3",
            )
            for directives, size in (
                ({}, "2 nodes"),
                ({"ntasks_per_node": 4}, "2 nodes with 4 tasks each"),
                ({"nodes": 1, "ntasks_per_node": 4}, "1 node with 4 tasks each"),
                ({"nodes": "2-4"}, "several nodes"),
            )
        ),
        slurm("python train.py", nodes=1),
        slurm("python prepare.py", SRUN),
    ],
    "torchrun starts on one node only": [
        (
            slurm(TORCHRUN),
            *(9, "wrong", "torchrun starts on the first node only, in a job of 2 nodes"),
            f"srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 {TORCHRUN}",
        ),
        slurm("torchrun --nproc_per_node=4 train.py", nodes=1),
    ],
    "one torchrun per node": [
        (
            slurm(f"srun {OPTIONS} {TORCHRUN}", ntasks_per_node=4),
            *(9, "wrong", "srun starts torchrun 4 times on each node", "#SBATCH --ntasks-per-node=1"),
        ),
        (
            slurm(f"srun {OPTIONS} --ntasks=8 {TORCHRUN}", ntasks_per_node=None),
            *(8, "wrong", "srun starts torchrun 4 times on each node", "srun --ntasks-per-node=1"),
        ),
    ],
    "accelerate gets options of accelerate": [
        (
            slurm("accelerate launch --num_machines=1 train.py"),
            *(9, "wrong", "accelerate starts on the first"),
            "srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 accelerate for 2 machines, with --num_machines=2"
            " --rdzv_backend=c10d --main_process_ip=FIRST_MACHINE --main_process_port=PORT",
        )
    ],
    "srun needs the cores again": [
        (
            slurm("srun --kill-on-bad-exit=1 python train.py"),
            *(9, "wrong", f"{CORES} from sbatch", "srun --cpus-per-task=4 ..."),
        ),
        (slurm("srun -K ./train.sh"), 9, "wrong", CORES),
        (slurm("# SRUN_CPUS_PER_TASK", "srun -K python train.py"), 10, "wrong", "srun does not inherit"),
        *(
            slurm(f"srun {option} -K python train.py")
            for option in ("-c 4", "-c4", "--cpus-per-task 4", "--cpus-per-task=$SLURM_CPUS_PER_TASK")
        ),
        slurm("export SRUN_CPUS_PER_TASK=4", "srun -K python train.py"),
    ],
    "a failed task ends the others": [
        (
            slurm("srun -c 4 python train.py"),
            *(9, "risky", "if one task fails, the others may wait for it", "srun --kill-on-bad-exit=1 ..."),
        ),
        slurm("srun -c 4 python train.py", nodes=1),
        slurm("srun -n1 -c 4 python prepare.py", ntasks_per_node=4),
        slurm("export SLURM_KILL_BAD_EXIT=1", "srun -c 4 python train.py"),
        slurm(f"srun -c 4 {TORCHRUN.replace('nnodes=2', 'nnodes=1:2')}"),  # an elastic job may lose a node
    ],
    "tasks that see one GPU each": [
        (slurm(SRUN, ntasks_per_node=4, gpus_per_task=1), 9, "risky", OWN_GPU),
        *(
            (slurm(f"srun --gpu-bind={binding} {OPTIONS} python train.py", **directives), line, "risky", OWN_GPU)
            for binding in ("single:1", "closest", "map_gpu:0,1", "per_task:1")
            for line, directives in ((9, {"ntasks_per_node": 2}), (10, {"ntasks_per_node": 4, "gres": "gpu:4"}))
        ),
        slurm(f"srun --gpu-bind=none {OPTIONS} python train.py", ntasks_per_node=4, gpus_per_task=1),
        slurm(SRUN, ntasks_per_node=2, gpus_per_task=1, gpu_bind="none"),
        slurm(SRUN, gpus_per_task=1),
    ],
    "a process for each GPU": [
        *(
            case
            for gpus in GPU_REQUESTS
            for case in (
                (slurm(SRUN, **gpus), 10, "risky", "of 4 GPUs per node, 1 is used"),
                (slurm(SRUN, ntasks_per_node=8, **gpus), 10, "wrong", "8 processes per node share 4 GPUs"),
                slurm(SRUN, ntasks_per_node=4, **gpus),
                slurm(f"srun {OPTIONS} {TORCHRUN}", **gpus),
                (
                    slurm(f"srun {OPTIONS} {TORCHRUN.replace('node=4', 'node=2')}", **gpus),
                    *(10, "risky", "of 4 GPUs per node, 2 are used", "--nproc-per-node=4"),
                ),
            )
        ),
        (  # a total number of tasks takes precedence
            slurm(SRUN, nodes=4, ntasks_per_node=8, ntasks=4, gpus_per_node=8),
            *(11, "risky", "of 8 GPUs per node, 1 is used", "#SBATCH --ntasks-per-node=8, without --ntasks"),
        ),
        slurm(f"srun {OPTIONS} bash train.sh", gres="gpu:4"),  # may start any number of processes
    ],
    "counts that contradict the job": [
        (
            slurm(f"srun {OPTIONS} {TORCHRUN.replace('nnodes=2', 'nnodes=4')}"),
            *(9, "wrong", "--nnodes 4 does not match the job (nodes: 2)"),
        ),
        (slurm(f"{SRUN} --num_nodes 4"), 9, "wrong", "--num_nodes 4 does not match the job (nodes: 2)"),
        (
            slurm(f"{SRUN} --nodes=2 --devices=4"),
            *(9, "wrong", "--devices 4 does not match the job (tasks per node: 1)"),
        ),
        slurm(f"{SRUN} --nodes $SLURM_NNODES --devices 4", ntasks_per_node=4),
        slurm(f"srun --nodes=1 {OPTIONS} python train.py --nodes 1 --devices 1"),
    ],
    "tasks need the variables of the script": [
        (slurm(SRUN, export="NONE"), 10, "wrong", NO_PATH, "srun --export=ALL ..."),
        (slurm(f"srun {OPTIONS} --export=NONE python train.py"), 9, "wrong", NO_PATH, "srun --export=ALL ..."),
        (slurm(f"srun {OPTIONS} --export=A=1,B python train.py"), 9, "wrong", NO_PATH, "srun --export=ALL,A=1,B ..."),
        slurm(f"srun {OPTIONS} --export=ALL,A=1 python train.py"),
        slurm("unset SLURM_EXPORT_ENV", SRUN, export="NONE"),
    ],
    "a container needs an option for GPUs": [
        (
            slurm(APPTAINER.format(""), gpus_per_node=1),
            *(10, "risky", "does not see the GPUs", "apptainer exec --nv ..."),
        ),
        slurm(APPTAINER.format("--nv"), gpus_per_node=1),
        slurm(APPTAINER.format("")),
    ],
    "a step in the background keeps the processors": [
        (slurm("srun nvidia-smi dmon >gpu.log &", SRUN), 9, "risky", "line 10 may wait until this step ends"),
        slurm("srun --overlap nvidia-smi dmon >gpu.log &", SRUN),
        slurm("srun cp data /tmp &", "wait || exit", SRUN),
        *(slurm(f"srun -c 4 -N 2 {name} start --block &", "python train.py") for name in ("ray", "dask")),
    ],
    "the number of GPUs is not in SLURM_GPUS_PER_NODE": [
        (
            slurm(f"srun {OPTIONS} {TORCHRUN.replace('=4', '=$SLURM_GPUS_PER_NODE')}", **gpus),
            *(10, "wrong", f"$SLURM_GPUS_PER_NODE {value}", "$SLURM_GPUS_ON_NODE"),
        )
        for gpus, value in (({"gres": "gpu:4"}, "is not set"), ({"gpus_per_node": "a100:4"}, "is a100:4"))
    ],
    "one srun per node": [
        slurm(
            *("for i in 0 1; do", f"srun --nodes=1 --ntasks=1 -w ${{n[$i]}} {OPTIONS} {ONE} &", "pids+=($!)", "done"),
            'for p in "${pids[@]}"; do wait $p || exit 1; done',
        )
    ],
    "a branch for one machine": [
        slurm(
            *('if [ -n "$DEBUG" ]; then', "  torchrun --standalone --nproc_per_node=2 train.py", "else"),
            *(f"  srun {OPTIONS} {TORCHRUN.replace('n1:$P', '$HEAD:$P')}", "fi"),
        )
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])
