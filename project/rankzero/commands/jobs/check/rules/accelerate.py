"""Rules about `accelerate launch` and deepspeed on several machines."""

from collections.abc import Iterator

from rankzero.commands.jobs.check.finding import WRONG, Finding
from rankzero.commands.jobs.check.rules.machines import uses_machines
from rankzero.commands.jobs.check.user_script import UserScript


def machines(script: UserScript) -> Iterator[Finding]:
    """`accelerate launch` on machines that do not know of each other, or that all have the same rank."""
    for command in script.training:
        if "accelerate" not in command.launchers or command.is_open("accelerate"):
            continue
        if command.option("accelerate", "--config-file"):
            continue
        count = command.option("accelerate", "--num-machines")
        is_single = count is None or script.resolved(count.text, command) == "1"
        if is_single and command.launchers[:1] in (["srun"], ["pbsdsh"]) and uses_machines(script, command):
            found = "accelerate without --num_machines: each machine trains alone"
            instead = "accelerate launch --num_machines=N --rdzv_backend=c10d --main_process_ip=FIRST_MACHINE ..."
            yield Finding(command.line, WRONG, found, instead)
        rank = command.option("accelerate", "--machine-rank")
        backend = command.option("accelerate", "--rdzv-backend")
        if not is_single and rank is None and (backend is None or backend.text != "c10d"):
            found = "without --machine_rank, every machine has rank 0"
            yield Finding(command.line, WRONG, found, "accelerate launch --rdzv_backend=c10d ...")


def deepspeed(script: UserScript) -> Iterator[Finding]:
    """deepspeed, which reaches the other machines itself, started on each of them."""
    names = ("--hostfile", "--no-ssh", "--node-rank", "--launcher", "-H")
    for command in script.training:
        if command.launchers[:2] != ["srun", "deepspeed"] or command.is_open("deepspeed"):
            continue
        if command.option("deepspeed", *names) is None and uses_machines(script, command):
            found = "srun starts deepspeed on each node, and each of them trains alone"
            yield Finding(command.line, WRONG, found, "deepspeed --launcher slurm ..., without srun")


RULES = (machines, deepspeed)
