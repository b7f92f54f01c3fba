from job_scripts import one_finding, slurm

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1"
C10D = "--rdzv_backend=c10d --main_process_ip=$host"
MACHINES = "accelerate launch --num_machines 2"
TOTAL = "srun -c 4 -K accelerate launch --num_machines=2 --num_processes={} --rdzv_backend=c10d"
TOTAL += " --main_process_ip=n1 --main_process_port=$P train.py"

CASES = {
    "correct: a launch with an address": [
        slurm(f"{SRUN} accelerate launch {options} train.py")
        for options in (f"--num_machines=2 {C10D}", "--config_file x.yaml", "$OPTIONS", '"${OPTIONS[@]}"')
    ],
    "accelerate without --num_machines: each machine trains alone": [
        slurm(f"{SRUN} accelerate launch --num_processes=4 train.py", nodes=1),
        *(
            (9, slurm(f"{SRUN} {program} {options} train.py"))
            for program in ("accelerate launch", "python -m accelerate.commands.launch")
            for options in ("", "--num_processes 8", "--num_machines 1")
        ),
    ],
    "without --machine_rank, every machine has rank 0": [
        (9, slurm(f"{SRUN} {MACHINES} --main_process_ip $host train.py")),
        slurm(f"{SRUN} bash -c '{MACHINES} --main_process_ip $host --machine_rank $SLURM_NODEID train.py'"),
    ],
    "srun starts deepspeed on each node": [
        (9, slurm(f"{SRUN} deepspeed --num_gpus 4 train.py")),
        slurm(f"{SRUN} deepspeed --no_ssh --node_rank $X train.py"),
        slurm("deepspeed --hostfile hosts train.py"),
    ],
    "each of them starts the processes of all nodes": [(9, slurm("srun -c 4 -K deepspeed --hostfile hosts a.py"))],
}

test_the_only_finding_in_a_script = one_finding(CASES)
