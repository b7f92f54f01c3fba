import pytest

from job_scripts import findings, only, slurm

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1"
C10D = "--rdzv_backend=c10d --main_process_ip=$host"


def test_a_correct_accelerate_launch_has_no_findings():
    for options in (f"--num_machines=2 {C10D}", "--config_file x.yaml", "$OPTIONS", '"${OPTIONS[@]}"'):
        assert findings(slurm(f"{SRUN} accelerate launch {options} train.py")) == []
    assert findings(slurm(f"{SRUN} accelerate launch --num_processes=4 train.py", nodes=1)) == []


@pytest.mark.parametrize("program", ["accelerate launch", "python -m accelerate.commands.launch"])
@pytest.mark.parametrize("options", ["", "--num_processes 8", "--num_machines 1"])
def test_each_machine_of_accelerate_trains_alone(program, options):
    text = slurm(f"{SRUN} {program} {options} train.py")
    only(text, 9, "wrong", "accelerate without --num_machines: each machine trains alone")


def test_all_machines_of_accelerate_have_rank_zero():
    command = f"{SRUN} accelerate launch --num_machines 2 --main_process_ip $host"
    only(slurm(f"{command} train.py"), 9, "wrong", "without --machine_rank, every machine has rank 0")
    command = command.removeprefix(f"{SRUN} ") + " --machine_rank $SLURM_NODEID train.py"
    assert findings(slurm(f"{SRUN} bash -c '{command}'")) == []


def test_the_port_of_accelerate_is_fixed():
    command = f"{SRUN} accelerate launch --num_machines 2 {C10D} --main_process_port 29500 train.py"
    only(slurm(command), 9, "risky", "two jobs on one machine cannot both use port 29500")


def test_each_machine_of_deepspeed_trains_alone():
    only(slurm(f"{SRUN} deepspeed --num_gpus 4 train.py"), 9, "wrong", "srun starts deepspeed on each node")
    assert findings(slurm(f"{SRUN} deepspeed --no_ssh --node_rank $X train.py")) == []
    assert findings(slurm("deepspeed --hostfile hosts train.py")) == []


def test_the_number_of_processes_of_accelerate_is_the_total():
    options = "--num_machines=2 --num_processes={} --rdzv_backend=c10d --main_process_ip=n1 --main_process_port=$P"
    text = f"srun -c 4 -K accelerate launch {options} train.py"
    found = only(slurm(text.format(4), gpus_per_node=4), 10, "risky", "--num_processes is the total: 4 processes")
    assert found == "--num_processes=8" and findings(slurm(text.format(8), gpus_per_node=4)) == []


def test_srun_starts_deepspeed_with_a_host_file_on_each_node():
    text = slurm("srun -c 4 -K deepspeed --hostfile hosts train.py")
    only(text, 9, "wrong", "each of them starts the processes of all nodes")
