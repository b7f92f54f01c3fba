"""Tasks of a Slurm step (`srun`), and batch scripts and shells in an allocation without a started task."""

import re
from itertools import product

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint


def found(variables: Variables) -> bool:
    """Returns whether this process is a task of a step. SLURM_NTASKS is no evidence: a batch script has it too.

    Ids from 0xFFFFFFF0 on are those of special steps, such as batch scripts and salloc's shell (slurm.h).
    """
    step = variables.find("SLURM_STEP_ID") or "batch"
    return step.isdigit() and int(step) < 0xFFFFFFF0 and "SLURM_PROCID" in variables


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that the step's variables describe."""
    job = variables.find("SLURM_JOB_ID") or "0"
    step = variables.find("SLURM_STEP_ID") or "0"
    tasks = variables.find_number("SLURM_STEP_NUM_TASKS") or variables.number("SLURM_NTASKS")
    hosts = expand_hosts(variables.find("SLURM_STEP_NODELIST") or variables.find("SLURM_NODELIST") or "")
    num_nodes = variables.find_number("SLURM_STEP_NUM_NODES") or len(hosts) or 1
    first_host = "127.0.0.1" if num_nodes == 1 else next(iter(hosts), None)
    address, port = rendezvous_endpoint(variables, requested, first_host, world_id(variables))
    tasks_per_node = expand_tasks(variables.find("SLURM_STEP_TASKS_PER_NODE") or "")
    node_rank = variables.number("SLURM_NODEID")
    return Launch(
        evidence=f"SLURM_JOB_ID={job} SLURM_STEP_ID={step}",
        rank=variables.number("SLURM_PROCID"),
        local_rank=variables.number("SLURM_LOCALID"),
        world_size=tasks,
        local_world_size=tasks_per_node[node_rank] if node_rank < len(tasks_per_node) else None,
        num_nodes=num_nodes,
        node_rank=node_rank,
        processes_per_node=tasks_per_node if len(tasks_per_node) == num_nodes else None,
        hosts=hosts,
        address=address,
        port=port,
        world_id=world_id(variables),
        job_id=job,
        restarts=variables.find_number("SLURM_RESTART_COUNT") or 0,
    )


def world_id(variables: Variables) -> str:
    """Returns an id that the tasks of a step share with no other job, step or requeued attempt."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + " ".join(variables.find(name) or "0" for name in names)


def allocation(variables: Variables) -> Launch | None:
    """Returns the Slurm allocation around this process, in which no task has been started; None outside one."""
    if (job := variables.find("SLURM_JOB_ID")) is None:
        return None
    nodes = variables.find_number("SLURM_JOB_NUM_NODES") or variables.find_number("SLURM_NNODES") or 1
    tasks = variables.find_number("SLURM_NTASKS") or nodes * (variables.find_number("SLURM_NTASKS_PER_NODE") or 1)
    return Launch("slurm", f"SLURM_JOB_ID={job} without a SLURM_STEP_ID", world_size=tasks, num_nodes=nodes)


def expand_tasks(text: str) -> tuple[int, ...]:
    """Returns the number of tasks on each node from Slurm's notation: `2(x3),1` is 2, 2, 2, 1."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(tasks) for tasks, repeats in groups for _ in range(int(repeats or 1)))


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expands Slurm's notation of host names, in order: `rack[0-1]n[08-10],login` is rack0n08, rack0n09, ... login."""
    hosts: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = [_expand_range(part) for part in re.findall(r"\[[^\]]*\]|[^\[]+", name)]
        hosts += ("".join(choice) for choice in product(*parts))
    return tuple(hosts)


def _expand_range(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    values = []
    for item in part.strip("[]").split(","):
        first, _, last = item.partition("-")
        values += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return values


LAUNCHER = Launcher(
    "slurm",
    found,
    read,
    command="srun --nodes={nodes} --ntasks-per-node={devices} python launch/fit.py ...",
    rank_variables=("SLURM_PROCID",),
    shown_variables=("SLURM_PROCID",),
    one_per_node="srun --ntasks-per-node=1",
    gathers_output=True,
)
