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
        f"wrong: one process starts, on the first node, in a job of {size}": [
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
    "wrong: torchrun starts on the first node only, in a job of 2 nodes": [
        (9, slurm(TORCHRUN), f"srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 {TORCHRUN}"),
        slurm("torchrun --nproc_per_node=4 train.py", nodes=1),
        slurm(  # a branch for one machine
            *('if [ -n "$DEBUG" ]; then', "  torchrun --standalone --nproc_per_node=2 train.py", "else"),
            *(f"  {TO.replace('n1:$P', '$HEAD:$P')}", "fi"),
        ),
    ],
    "wrong: srun starts torchrun 4 times on each node": [
        (9, slurm(TO, ntasks_per_node=4), "#SBATCH --ntasks-per-node=1"),
        (8, slurm(f"srun {OPTIONS} --ntasks=8 {TORCHRUN}", ntasks_per_node=None), "srun --ntasks-per-node=1"),
        slurm(  # one srun per node
            *("for i in 0 1; do", f"srun --nodes=1 --ntasks=1 -w ${{n[$i]}} {OPTIONS} {ONE} &", "pids+=($!)", "done"),
            'for p in "${pids[@]}"; do wait $p || exit 1; done',
        ),
    ],
    "wrong: accelerate starts on the first": [(9, slurm("accelerate launch --num_machines=1 train.py"), ACCELERATE)],
    "risky: in Slurm 22.05 and 23.02, srun does not inherit --cpus-per-task": [
        (9, slurm("srun --kill-on-bad-exit=1 python train.py"), "srun --cpus-per-task=4 ..."),
        (9, slurm("srun -K ./train.sh")),
        (10, slurm("# SRUN_CPUS_PER_TASK", "srun -K python train.py")),
        *(
            slurm(f"srun {option} -K python train.py")
            for option in ("-c 4", "-c4", "--cpus-per-task 4", "--cpus-per-task=$SLURM_CPUS_PER_TASK")
        ),
        slurm("export SRUN_CPUS_PER_TASK=4", "srun -K python train.py"),
    ],
    "risky: if one task fails, the others may wait for it": [
        (9, slurm("srun -c 4 python train.py"), "srun --kill-on-bad-exit=1 ..."),
        slurm("srun -c 4 python train.py", nodes=1),
        slurm("srun -n1 -c 4 python prepare.py", ntasks_per_node=4),
        slurm("export SLURM_KILL_BAD_EXIT=1", "srun -c 4 python train.py"),
        slurm(f"srun -c 4 {TORCHRUN.replace('nnodes=2', 'nnodes=1:2')}"),  # an elastic job may lose a node
    ],
    "risky: each task sees only its own GPU": [
        (9, slurm(SRUN, ntasks_per_node=4, gpus_per_task=1)),
        *(
            (line, slurm(f"srun --gpu-bind={binding} {OPTIONS} python train.py", **directives))
            for binding in ("single:1", "closest", "map_gpu:0,1", "per_task:1")
            for line, directives in ((9, {"ntasks_per_node": 2}), (10, {"ntasks_per_node": 4, "gres": "gpu:4"}))
        ),
        slurm(f"srun --gpu-bind=none {OPTIONS} python train.py", ntasks_per_node=4, gpus_per_task=1),
        slurm(SRUN, ntasks_per_node=2, gpus_per_task=1, gpu_bind="none"),
        slurm(SRUN, gpus_per_task=1),
    ],
    "risky: of 4 GPUs per node, 1 is used": [
        *((10, slurm(SRUN, **gpus)) for gpus in GPUS),
        *(slurm(SRUN, ntasks_per_node=4, **gpus) for gpus in GPUS),
        *(slurm(TO, **gpus) for gpus in GPUS),
        slurm(f"srun {OPTIONS} bash train.sh", gres="gpu:4"),  # may start any number of processes
    ],
    "wrong: 8 processes per node share 4 GPUs": [(10, slurm(SRUN, ntasks_per_node=8, **gpus)) for gpus in GPUS],
    "risky: of 4 GPUs per node, 2 are used": [
        (10, slurm(TO.replace("node=4", "node=2"), **gpus), "--nproc-per-node=4") for gpus in GPUS
    ],
    "risky: of 8 GPUs per node, 1 is used": [  # a total number of tasks takes precedence
        (11, slurm(SRUN, nodes=4, ntasks_per_node=8, ntasks=4, gpus_per_node=8), TOTAL)
    ],
    "wrong: --nnodes 4 does not match the job (nodes: 2)": [(9, slurm(TO.replace("nnodes=2", "nnodes=4")))],
    "wrong: --num_nodes 4 does not match the job (nodes: 2)": [(9, slurm(f"{SRUN} --num_nodes 4"))],
    "wrong: --devices 4 does not match the job (tasks per node: 1)": [
        (9, slurm(f"{SRUN} --nodes=2 --devices=4")),
        slurm(f"{SRUN} --nodes $SLURM_NNODES --devices 4", ntasks_per_node=4),
        slurm(f"srun --nodes=1 {OPTIONS} python train.py --nodes 1 --devices 1"),
    ],
    "wrong: the tasks do not get PATH": [
        (10, slurm(SRUN, export="NONE"), "srun --export=ALL ..."),
        (9, slurm(f"srun {OPTIONS} --export=NONE python train.py"), "srun --export=ALL ..."),
        (9, slurm(f"srun {OPTIONS} --export=A=1,B python train.py"), "srun --export=ALL,A=1,B ..."),
        slurm(f"srun {OPTIONS} --export=ALL,A=1 python train.py"),
        slurm("unset SLURM_EXPORT_ENV", SRUN, export="NONE"),
    ],
    "risky: does not see the GPUs": [
        (10, slurm(APPTAINER.format(""), gpus_per_node=1), "apptainer exec --nv ..."),
        slurm(APPTAINER.format("--nv"), gpus_per_node=1),
        slurm(APPTAINER.format("")),
    ],
    "risky: line 10 may wait until this step ends": [
        (9, slurm("srun nvidia-smi dmon >gpu.log &", SRUN)),
        slurm("srun --overlap nvidia-smi dmon >gpu.log &", SRUN),
        slurm("srun cp data /tmp &", "wait || exit", SRUN),
        *(slurm(f"srun -c 4 -N 2 {name} start --block &", "python train.py") for name in ("ray", "dask")),
    ],
    "wrong: $SLURM_GPUS_PER_NODE is not set": [(10, slurm(ON_GPUS, gres="gpu:4"), "$SLURM_GPUS_ON_NODE")],
    "wrong: $SLURM_GPUS_PER_NODE is a100:4": [(10, slurm(ON_GPUS, gpus_per_node="a100:4"), "$SLURM_GPUS_ON_NODE")],
}

test_the_only_finding_in_a_script = one_finding(CASES)
