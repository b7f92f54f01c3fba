"""Rules about `accelerate launch` and deepspeed on several machines."""

from collections.abc import Iterator

from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.machines import uses_machines
from rankzero.commands.jobs.check.user_script import UserScript


def several_machines(count: int | str) -> str:
    """Returns the options of `accelerate launch` for several machines."""
    return f"--num_machines={count} --rdzv_backend=c10d --main_process_ip=FIRST_MACHINE --main_process_port=PORT"


def machines(script: UserScript) -> Iterator[Finding]:
    """`accelerate launch` on machines that do not know of each other, or that all have the same rank."""
    for command in script.training:
        if "accelerate" not in command.launchers or command.is_open("accelerate"):
            continue
        if command.option("accelerate", "--config-file"):
            continue
        count = command.option("accelerate", "--num-machines")
        is_single = count is None or script.count(count.text, command) == 1
        if is_single and command.launchers[:1] in (["srun"], ["pbsdsh"]) and uses_machines(script, command):
            found = "accelerate without --num_machines: each machine trains alone"
            instead = f"accelerate launch {several_machines('N')} ..."
            yield Finding(command.line, found, instead)
        rank = command.option("accelerate", "--machine-rank")
        backend = command.option("accelerate", "--rdzv-backend")
        if not is_single and rank is None and (backend is None or backend.text != "c10d"):
            found = "without --machine_rank, every machine has rank 0"
            yield Finding(command.line, found, "accelerate launch --rdzv_backend=c10d ...")


def deepspeed(script: UserScript) -> Iterator[Finding]:
    """deepspeed, which reaches the other machines itself, started on each of them."""
    names = ("--no-ssh", "--node-rank", "--launcher")
    for command in script.training:
        if command.launchers[:2] != ["srun", "deepspeed"] or command.is_open("deepspeed"):
            continue
        if command.option("deepspeed", *names) is None and uses_machines(script, command):
            hosts = command.option("deepspeed", "--hostfile", "-H")
            result = "trains alone" if hosts is None else "starts the processes of all nodes"
            found = f"srun starts deepspeed on each node, and each of them {result}"
            yield Finding(command.line, found, "deepspeed --launcher slurm ..., without srun")


RULES = (machines, deepspeed)
