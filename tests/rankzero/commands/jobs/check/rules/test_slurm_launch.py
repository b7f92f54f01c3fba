from job_scripts import one_finding, slurm

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py"
ONE = TORCHRUN.replace("--rdzv_backend=c10d --rdzv_endpoint=n1:$P", "--node_rank=$i --master_addr=n1 --master_port=$P")
TO = f"srun {OPTIONS} {TORCHRUN}"
APPTAINER = f"srun {OPTIONS} apptainer exec {{}} x.sif python train.py"
IN_TASKS = "srun --kill-on-bad-exit=1 --cpus-per-task=4 python train.py --epochs 3"
ACCELERATE = "srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 accelerate for 2 machines, with --num_machines=2"
ACCELERATE += " --rdzv_backend=c10d --main_process_ip=FIRST_MACHINE --main_process_port=PORT"
TOTAL = "#SBATCH --ntasks-per-node=8, without --ntasks"
GPUS = ({"gres": "gpu:4"}, {"gres": "nvme:200,gpu:v100:4,disk:9"}, {"gpus_per_node": "a100:4"}, {"gpus": 8})
ON_GPUS = TO.replace("=4 --rdzv", "=$SLURM_GPUS_PER_NODE --rdzv")

CASES = {
    **{
        f"one process starts, on the first node, in a job of {size}": [
            (9, slurm("python train.py --epochs 3", **directives), IN_TASKS)
        ]
        for size, directives in {
            "2 nodes": {},
            "2 nodes with 4 tasks each": {"ntasks_per_node": 4},
            "1 node with 4 tasks each": {"nodes": 1, "ntasks_per_node": 4},
            "several nodes": {"nodes": "2-4"},
        }.items()
    },
    "correct: one process without srun": [slurm("python train.py", nodes=1), slurm("python prepare.py", SRUN)],
    "torchrun starts on the first node only, in a job of 2 nodes": [
        (9, slurm(TORCHRUN), f"srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 {TORCHRUN}"),
        slurm("torchrun --nproc_per_node=4 train.py", nodes=1),
        slurm(  # a branch for one machine
            *('if [ -n "$DEBUG" ]; then', "  torchrun --standalone --nproc_per_node=2 train.py", "else"),
            *(f"  {TO.replace('n1:$P', '$HEAD:$P')}", "fi"),
        ),
    ],
    "srun starts torchrun 4 times on each node": [
        (9, slurm(TO, ntasks_per_node=4), "#SBATCH --ntasks-per-node=1"),
        (8, slurm(f"srun {OPTIONS} --ntasks=8 {TORCHRUN}", ntasks_per_node=None), "srun --ntasks-per-node=1"),
        slurm(  # one srun per node
            *("for i in 0 1; do", f"srun --nodes=1 --ntasks=1 -w ${{n[$i]}} {OPTIONS} {ONE} &", "pids+=($!)", "done"),
            'for p in "${pids[@]}"; do wait $p || exit 1; done',
        ),
    ],
    "accelerate starts on the first": [(9, slurm("accelerate launch --num_machines=1 train.py"), ACCELERATE)],
    "8 processes per node share 4 GPUs": [(10, slurm(SRUN, ntasks_per_node=8, **gpus)) for gpus in GPUS],
    "--nnodes 4 does not match the job (nodes: 2)": [(9, slurm(TO.replace("nnodes=2", "nnodes=4")))],
    "--num_nodes 4 does not match the job (nodes: 2)": [(9, slurm(f"{SRUN} --num_nodes 4"))],
    "--devices 4 does not match the job (tasks per node: 1)": [
        (9, slurm(f"{SRUN} --nodes=2 --devices=4")),
        slurm(f"{SRUN} --nodes $SLURM_NNODES --devices 4", ntasks_per_node=4),
        slurm(f"srun --nodes=1 {OPTIONS} python train.py --nodes 1 --devices 1"),
    ],
    "the tasks do not get PATH": [
        (10, slurm(SRUN, export="NONE"), "srun --export=ALL ..."),
        (9, slurm(f"srun {OPTIONS} --export=NONE python train.py"), "srun --export=ALL ..."),
        (9, slurm(f"srun {OPTIONS} --export=A=1,B python train.py"), "srun --export=ALL,A=1,B ..."),
        slurm(f"srun {OPTIONS} --export=ALL,A=1 python train.py"),
        slurm("unset SLURM_EXPORT_ENV", SRUN, export="NONE"),
    ],
    "$SLURM_GPUS_PER_NODE is not set": [(10, slurm(ON_GPUS, gres="gpu:4"), "$SLURM_GPUS_ON_NODE")],
    "$SLURM_GPUS_PER_NODE is a100:4": [(10, slurm(ON_GPUS, gpus_per_node="a100:4"), "$SLURM_GPUS_ON_NODE")],
}

test_the_only_finding_in_a_script = one_finding(CASES)
