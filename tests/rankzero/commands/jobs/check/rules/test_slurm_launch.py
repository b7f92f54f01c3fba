import pytest

from job_scripts import findings, only, slurm
from rankzero.commands.jobs.check.checker import check

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
def test_without_srun_one_process_starts(directives, size):
    text = f"one process starts, on the first node, in a job of {size}"
    instead = only(slurm("python train.py --epochs 3", **directives), 9, "wrong", text)
    assert instead == "srun --kill-on-bad-exit=1 --cpus-per-task=4 python train.py --epochs 3"


def test_torchrun_starts_on_one_node_only():
    instead = only(slurm(TORCHRUN), 9, "wrong", "torchrun starts on the first node only, in a job of 2 nodes")
    assert instead == f"srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 {TORCHRUN}"


@pytest.mark.parametrize(
    ("options", "directives", "instead"),
    [
        ("", {"ntasks_per_node": 4}, "#SBATCH --ntasks-per-node=1"),
        ("--ntasks=8", {"ntasks_per_node": None}, "srun --ntasks-per-node=1"),
    ],
)
def test_one_torchrun_per_node(options, directives, instead):
    text = slurm(f"srun {OPTIONS} {options} {TORCHRUN}", **directives)
    line = len(text.splitlines())
    assert only(text, line, "wrong", "srun starts torchrun 4 times on each node") == instead


@pytest.mark.parametrize("option", ["-c 4", "-c4", "--cpus-per-task 4", "--cpus-per-task=$SLURM_CPUS_PER_TASK"])
def test_srun_needs_the_cores_again(option):
    text = slurm("srun --kill-on-bad-exit=1 python train.py")
    instead = only(text, 9, "wrong", "srun does not inherit --cpus-per-task from sbatch")
    assert instead == "srun --cpus-per-task=4 ..."
    assert findings(slurm(f"srun {option} -K python train.py")) == []
    assert findings(slurm("export SRUN_CPUS_PER_TASK=4", "srun -K python train.py")) == []


def test_a_failed_task_ends_the_others():
    found = "if one task fails, the others may wait for it"
    only(slurm("srun -c 4 python train.py"), 9, "risky", found, "srun --kill-on-bad-exit=1 ...")


@pytest.mark.parametrize("binding", ["single:1", "closest", "map_gpu:0,1", "per_task:1"])
def test_tasks_that_see_one_gpu_each(binding):
    found = "each task sees only its own GPU"
    only(slurm(SRUN, ntasks_per_node=4, gpus_per_task=1), 9, "risky", found)
    command = f"srun --gpu-bind={binding} {OPTIONS} python train.py"
    only(slurm(command, ntasks_per_node=2), 9, "risky", found)
    only(slurm(command, ntasks_per_node=4, gres="gpu:4"), 10, "risky", found)


@pytest.mark.parametrize(
    "request_of_gpus",
    [{"gres": "gpu:4"}, {"gres": "nvme:200,gpu:v100:4,disk:9"}, {"gpus_per_node": "a100:4"}, {"gpus": 8}],
)
def test_a_process_for_each_gpu(request_of_gpus):
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
def test_counts_that_contradict_the_job(command, found):
    only(slurm(command), 9, "wrong", found)


def test_a_script_of_the_shell_needs_the_cores_again():
    only(slurm("srun -K ./train.sh"), 9, "wrong", "srun does not inherit --cpus-per-task")
    only(slurm("# SRUN_CPUS_PER_TASK", "srun -K python train.py"), 10, "wrong", "srun does not inherit")


def test_accelerate_gets_options_of_accelerate():
    instead = only(slurm("accelerate launch --num_machines=1 train.py"), 9, "wrong", "accelerate starts on the first")
    assert "--main_process_ip=FIRST_MACHINE" in instead and "--rdzv-endpoint" not in instead


def test_a_total_number_of_tasks_takes_precedence():
    text = slurm(f"srun {OPTIONS} python train.py", nodes=4, ntasks_per_node=8, ntasks=4, gpus_per_node=8)
    (found,) = [item for item in check(text) if "GPUs per node" in item.found]
    assert "of 8 GPUs per node, 1 is used" in found.found
    assert found.instead == "#SBATCH --ntasks-per-node=8, without --ntasks"


@pytest.mark.parametrize(
    ("option", "directives", "instead"),
    [
        ("", {"export": "NONE"}, "srun --export=ALL ..."),
        ("--export=NONE", {}, "srun --export=ALL ..."),
        ("--export=A=1,B", {}, "srun --export=ALL,A=1,B ..."),
    ],
)
def test_tasks_need_the_variables_of_the_script(option, directives, instead):
    text = slurm(f"srun {OPTIONS} {option} python train.py", **directives)
    (found,) = check(text)
    assert found.level == "wrong" and "the tasks do not get PATH" in found.found and found.instead == instead
    assert findings(slurm(f"srun {OPTIONS} --export=ALL,A=1 python train.py")) == []
    assert findings(slurm("unset SLURM_EXPORT_ENV", f"srun {OPTIONS} python train.py", export="NONE")) == []


def test_a_container_needs_an_option_for_gpus():
    command = f"srun {OPTIONS} apptainer exec {{}} x.sif python train.py"
    assert only(slurm(command.format(""), gpus_per_node=1), 10, "risky", "does not see the GPUs") == (
        "apptainer exec --nv ..."
    )
    assert findings(slurm(command.format("--nv"), gpus_per_node=1)) == findings(slurm(command.format(""))) == []


def test_a_step_in_the_background_keeps_the_processors():
    train = f"srun {OPTIONS} python train.py"
    only(slurm("srun nvidia-smi dmon >gpu.log &", train), 9, "risky", "line 10 may wait until this step ends")
    assert findings(slurm("srun --overlap nvidia-smi dmon >gpu.log &", train)) == []
    assert findings(slurm("srun cp data /tmp &", "wait || exit", train)) == []


@pytest.mark.parametrize(
    ("directives", "value"), [({"gres": "gpu:4"}, "is not set"), ({"gpus_per_node": "a100:4"}, "is a100:4")]
)
def test_the_number_of_gpus_is_not_in_slurm_gpus_per_node(directives, value):
    torchrun = TORCHRUN.replace("=4", "=$SLURM_GPUS_PER_NODE")
    (found,) = check(slurm(f"srun {OPTIONS} {torchrun}", **directives))
    assert value in found.found and found.instead == "$SLURM_GPUS_ON_NODE"


ONE = TORCHRUN.replace("--rdzv_backend=c10d --rdzv_endpoint=n1:$P", "--node_rank=$i --master_addr=n1 --master_port=$P")

CORRECT = {
    "one process without srun": [
        slurm("python train.py", nodes=1),
        slurm("python prepare.py", SRUN),
        slurm("torchrun --nproc_per_node=4 train.py", nodes=1),
    ],
    "a single task, which waits for no other": [
        slurm("srun -c 4 python train.py", nodes=1),
        slurm("srun -n1 -c 4 python prepare.py", ntasks_per_node=4),
        slurm("export SLURM_KILL_BAD_EXIT=1", "srun -c 4 python train.py"),
    ],
    "tasks that see all GPUs": [
        slurm(f"srun --gpu-bind=none {OPTIONS} python train.py", ntasks_per_node=4, gpus_per_task=1),
        slurm(SRUN, ntasks_per_node=2, gpus_per_task=1, gpu_bind="none"),
        slurm(SRUN, gpus_per_task=1),
    ],
    "the counts of the job": [
        slurm(f"{SRUN} --nodes $SLURM_NNODES --devices 4", ntasks_per_node=4),
        slurm(f"srun --nodes=1 {OPTIONS} python train.py --nodes 1 --devices 1"),
    ],
    "one srun per node": [
        slurm(
            *("for i in 0 1; do", f"srun --nodes=1 --ntasks=1 -w ${{n[$i]}} {OPTIONS} {ONE} &", "pids+=($!)", "done"),
            'for p in "${pids[@]}"; do wait $p || exit 1; done',
        )
    ],
    "a script of the shell, which may start any number of processes": [
        slurm(f"srun {OPTIONS} bash train.sh", gres="gpu:4")
    ],
    "the driver of servers on all nodes": [
        slurm(f"srun -c 4 -N 2 {name} start --block &", "python train.py") for name in ("ray", "dask")
    ],
    "a branch for one machine": [
        slurm(
            *('if [ -n "$DEBUG" ]; then', "  torchrun --standalone --nproc_per_node=2 train.py", "else"),
            *(f"  srun {OPTIONS} {TORCHRUN.replace('n1:$P', '$HEAD:$P')}", "fi"),
        )
    ],
    "an elastic job, which may lose a node": [slurm(f"srun -c 4 {TORCHRUN.replace('nnodes=2', 'nnodes=1:2')}")],
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_finding(name):
    assert [findings(text) for text in CORRECT[name]] == [[]] * len(CORRECT[name])
