import pytest

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py"


@pytest.mark.parametrize(
    ("directives", "size"),
    [
        ({}, "2 nodes"),
        ({"ntasks_per_node": 4}, "2 nodes with 4 tasks each"),
        ({"nodes": 1, "ntasks_per_node": 4}, "1 node with 4 tasks each"),
        ({"nodes": "2-4"}, "several nodes"),
    ],
)
def test_without_srun_one_process_starts(slurm, only, directives, size):
    text = f"one process starts, on the first node, in a job of {size}"
    instead = only(slurm("python train.py --epochs 3", **directives), 9, "wrong", text)
    assert instead == "srun --kill-on-bad-exit=1 --cpus-per-task=4 python train.py --epochs 3"


def test_one_process_needs_no_srun(slurm, findings):
    assert findings(slurm("python train.py", nodes=1)) == []
    assert findings(slurm("python prepare.py", SRUN)) == []
    assert findings(slurm("torchrun --nproc_per_node=4 train.py", nodes=1)) == []


def test_torchrun_starts_on_one_node_only(slurm, only):
    instead = only(slurm(TORCHRUN), 9, "wrong", "torchrun starts on the first node only, in a job of 2 nodes")
    assert instead == f"srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 {TORCHRUN}"


@pytest.mark.parametrize(
    ("options", "directives", "instead"),
    [
        ("", {"ntasks_per_node": 4}, "#SBATCH --ntasks-per-node=1"),
        ("--ntasks=8", {"ntasks_per_node": None}, "srun --ntasks-per-node=1"),
    ],
)
def test_one_torchrun_per_node(slurm, only, options, directives, instead):
    text = slurm(f"srun {OPTIONS} {options} {TORCHRUN}", **directives)
    line = len(text.splitlines())
    assert only(text, line, "wrong", "srun starts torchrun 4 times on each node") == instead


@pytest.mark.parametrize("option", ["-c 4", "-c4", "--cpus-per-task 4", "--cpus-per-task=$SLURM_CPUS_PER_TASK"])
def test_srun_needs_the_cores_again(slurm, only, findings, option):
    text = slurm("srun --kill-on-bad-exit=1 python train.py")
    instead = only(text, 9, "wrong", "srun does not inherit --cpus-per-task from sbatch")
    assert instead == "srun --cpus-per-task=4 ..."
    assert findings(slurm(f"srun {option} -K python train.py")) == []
    assert findings(slurm("export SRUN_CPUS_PER_TASK=4", "srun -K python train.py")) == []


def test_a_failed_task_ends_the_others(slurm, only, findings):
    instead = only(slurm("srun -c 4 python train.py"), 9, "risky", "if one task fails, the others may wait for it")
    assert instead == "srun --kill-on-bad-exit=1 ..."
    assert findings(slurm("srun -c 4 python train.py", nodes=1)) == []


def test_tasks_that_see_one_gpu_each(slurm, only, findings):
    found = "each task sees only its own GPU"
    only(slurm(SRUN, ntasks_per_node=4, gpus_per_task=1), 9, "risky", found)
    binding = f"srun --gpu-bind=single:1 {OPTIONS} python train.py"
    only(slurm(binding, ntasks_per_node=4, gres="gpu:4"), 10, "risky", found)
    binding = f"srun --gpu-bind=none {OPTIONS} python train.py"
    assert findings(slurm(binding, ntasks_per_node=4, gpus_per_task=1)) == []
    assert findings(slurm(SRUN, gpus_per_task=1)) == []


@pytest.mark.parametrize(
    "request_of_gpus",
    [{"gres": "gpu:4"}, {"gres": "nvme:200,gpu:v100:4,disk:9"}, {"gpus_per_node": "a100:4"}, {"gpus": 8}],
)
def test_a_process_for_each_gpu(slurm, only, findings, request_of_gpus):
    only(slurm(SRUN, **request_of_gpus), 10, "risky", "of 4 GPUs per node, 1 is used")
    only(slurm(SRUN, ntasks_per_node=8, **request_of_gpus), 10, "wrong", "8 processes per node share 4 GPUs")
    assert findings(slurm(SRUN, ntasks_per_node=4, **request_of_gpus)) == []
    srun = f"srun {OPTIONS} {TORCHRUN}"
    assert findings(slurm(srun, **request_of_gpus)) == []
    instead = only(
        slurm(srun.replace("node=4", "node=2"), **request_of_gpus), 10, "risky", "of 4 GPUs per node, 2 are used"
    )
    assert instead == "--nproc-per-node=4"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (f"srun {OPTIONS} {TORCHRUN.replace('nnodes=2', 'nnodes=4')}", "--nnodes 4 does not match the job (nodes: 2)"),
        (f"{SRUN} --num_nodes 4", "--num_nodes 4 does not match the job (nodes: 2)"),
        (f"{SRUN} --nodes=2 --devices=4", "--devices 4 does not match the job (tasks per node: 1)"),
    ],
)
def test_counts_that_contradict_the_job(slurm, only, command, found):
    only(slurm(command), 9, "wrong", found)


def test_counts_of_the_job(slurm, findings):
    assert findings(slurm(f"{SRUN} --nodes $SLURM_NNODES --devices 4", ntasks_per_node=4)) == []
    assert findings(slurm(f"srun --nodes=1 {OPTIONS} python train.py --nodes 1 --devices 1")) == []


def test_one_srun_per_node(slurm, findings):
    one = TORCHRUN.replace(
        "--rdzv_backend=c10d --rdzv_endpoint=n1:$P", "--node_rank=$i --master_addr=n1 --master_port=$P"
    )
    lines = (
        "for i in 0 1; do",
        f"srun --nodes=1 --ntasks=1 -w ${{n[$i]}} {OPTIONS} {one} &",
        "pids+=($!)",
        "done",
        'for p in "${pids[@]}"; do wait $p || exit 1; done',
    )
    assert findings(slurm(*lines)) == []


def test_a_script_of_the_shell_may_start_any_number_of_processes(slurm, only, findings):
    assert findings(slurm(f"srun {OPTIONS} bash train.sh", gres="gpu:4")) == []
    only(slurm("srun -K ./train.sh"), 9, "wrong", "srun does not inherit --cpus-per-task")
