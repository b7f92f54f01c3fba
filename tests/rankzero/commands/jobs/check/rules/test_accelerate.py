import pytest

from job_scripts import slurm, verify

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1"
C10D = "--rdzv_backend=c10d --main_process_ip=$host"
ALONE = "accelerate without --num_machines: each machine trains alone"
RANKED = "accelerate launch --num_machines 2 --main_process_ip $host"
TOTAL = "srun -c 4 -K accelerate launch --num_machines=2 --num_processes={} --rdzv_backend=c10d"
TOTAL += " --main_process_ip=n1 --main_process_port=$P train.py"
FIXED_PORT = f"accelerate launch --num_machines 2 {C10D} --main_process_port 29500"

CASES = {
    "a correct launch": [
        *(
            slurm(f"{SRUN} accelerate launch {options} train.py")
            for options in (f"--num_machines=2 {C10D}", "--config_file x.yaml", "$OPTIONS", '"${OPTIONS[@]}"')
        ),
        slurm(f"{SRUN} accelerate launch --num_processes=4 train.py", nodes=1),
    ],
    "each machine of accelerate trains alone": [
        (slurm(f"{SRUN} {program} {options} train.py"), 9, "wrong", ALONE)
        for program in ("accelerate launch", "python -m accelerate.commands.launch")
        for options in ("", "--num_processes 8", "--num_machines 1")
    ],
    "all machines have rank zero": [
        (slurm(f"{SRUN} {RANKED} train.py"), 9, "wrong", "without --machine_rank, every machine has rank 0"),
        slurm(f"{SRUN} bash -c '{RANKED} --machine_rank $SLURM_NODEID train.py'"),
    ],
    "a fixed port": [
        (slurm(f"{SRUN} {FIXED_PORT} train.py"), 9, "risky", "two jobs on one machine cannot both use port 29500")
    ],
    "the number of processes is the total": [
        (
            slurm(TOTAL.format(4), gpus_per_node=4),
            *(10, "risky", "--num_processes is the total: 4 processes", "--num_processes=8"),
        ),
        slurm(TOTAL.format(8), gpus_per_node=4),
    ],
    "each machine of deepspeed trains alone": [
        (slurm(f"{SRUN} deepspeed --num_gpus 4 train.py"), 9, "wrong", "srun starts deepspeed on each node"),
        slurm(f"{SRUN} deepspeed --no_ssh --node_rank $X train.py"),
        slurm("deepspeed --hostfile hosts train.py"),
        (
            slurm("srun -c 4 -K deepspeed --hostfile hosts train.py"),
            *(9, "wrong", "each of them starts the processes of all nodes"),
        ),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])
