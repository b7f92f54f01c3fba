"""Tasks started by `pbsdsh`, and PBS job scripts in which no task has been started.

PBS sets no rank variable. PBS_NODENUM is the index of a task's host, and always 0 in the job script. PBS_TASKNUM grows
with every spawn and is 1 in the job script. A task may get its rank on its command line
(`pbsdsh -n 3 -- env RANK=3 WORLD_SIZE=4 ...`). Otherwise there is one task for each line of the node file, and the
rendezvous assigns ranks host by host (OpenPBS 23.06). If a task cannot read the file, --nodes and --devices specify
the number of tasks.
"""

import os
import re
import socket
from collections import Counter
from pathlib import Path

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint


def found(variables: Variables) -> bool:
    """Returns whether this process is a pbsdsh task and not the job script."""
    return "PBS_JOBID" in variables and _task_number(variables) > 1


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that a task's variables describe."""
    job, node_rank = variables.text("PBS_JOBID"), variables.number("PBS_NODENUM")
    rank, hosts = variables.find_number("RANK"), node_file(variables)
    requested_size = (requested.nodes or 0) * (requested.devices or 0) or None
    # Without a rank on its command line, this task is one of those that pbsdsh starts for all lines of the node file.
    counts = tuple(Counter(hosts).values()) if rank is None and hosts else None
    size = requested_size if counts is None else sum(counts)
    if rank is not None:
        size = variables.find_number("WORLD_SIZE") or requested_size
    if size is None:
        raise KeyError("WORLD_SIZE" if rank is not None else "RANK")
    own_host = socket.gethostname() if node_rank == 0 else None
    num_nodes = len(counts) if counts else requested.nodes
    is_single_machine = size == 1 or num_nodes == 1 or variables.find_number("LOCAL_WORLD_SIZE") == size
    first_host = "127.0.0.1" if is_single_machine else own_host or next(iter(hosts), None)
    address, port = rendezvous_endpoint(variables, requested, first_host, f"pbs {job}")
    return Launch(
        evidence=f"PBS_JOBID={job} PBS_TASKNUM={variables.text('PBS_TASKNUM')}",
        rank=rank,
        local_rank=variables.find_number("LOCAL_RANK"),
        world_size=size,
        local_world_size=variables.find_number("LOCAL_WORLD_SIZE"),
        num_nodes=1 if is_single_machine else num_nodes,
        node_rank=0 if is_single_machine else node_rank,
        processes_per_node=counts,
        hosts=tuple(dict.fromkeys(hosts)),
        address=address,
        port=port,
        world_id=f"pbs {job}",
        job_id=job,
    )


def allocation(variables: Variables) -> Launch | None:
    """Returns the PBS job around this process, in which no task has been started; None outside a job."""
    if (job := variables.find("PBS_JOBID")) is None:
        return None
    lines = node_file(variables)
    return Launch("pbs", f"PBS_JOBID={job}, the job script", world_size=len(lines) or 1, num_nodes=len(set(lines)) or 1)


def node_file(variables: Variables) -> list[str]:
    """Returns the hosts of a job, one per process; empty if unknown.

    PBS_NODEFILE is unset for tasks on the first host, where the file is in the folder of the MoM (OpenPBS 23.06).
    """
    name, job = variables.find("PBS_NODEFILE"), variables.find("PBS_JOBID")
    if name is None and job is not None and "/" not in job:
        name = f"{pbs_setting('PBS_HOME') or '/var/spool/pbs'}/aux/{job}"
    try:
        return Path(name).read_text().split() if name else []
    except (OSError, UnicodeError):
        return []


def pbs_setting(name: str) -> str | None:
    """Returns a setting in pbs.conf, such as `PBS_EXEC`; None without the file or the setting.

    The path of the file is in PBS_CONF_FILE, by default /etc/pbs.conf (OpenPBS 23.06).
    """
    try:
        lines = Path(os.environ.get("PBS_CONF_FILE") or "/etc/pbs.conf").read_text().splitlines()
    except (OSError, UnicodeError):
        return None
    return dict(line.strip().partition("=")[::2] for line in lines).get(name) or None


def _task_number(variables: Variables) -> int:
    """Returns the value of PBS_TASKNUM, which is hexadecimal; 1 if it is unset, as for the job script."""
    text = variables.find("PBS_TASKNUM") or "1"
    if not re.fullmatch(r"[0-9a-fA-F]+", text):
        raise ValueError(f"PBS_TASKNUM={text!r} is not a hexadecimal number")
    return int(text, 16)


LAUNCHER = Launcher(
    "pbs",
    found,
    read,
    command='mpirun -np {processes} --hostfile "$PBS_NODEFILE" {python} launch/fit.py ...\n'
    'or pbsdsh -- {python} "$PWD/launch/fit.py" --root "$PWD/runs" ...',
    rank_variables=("PBS_NODENUM",),
    shown_variables=("PBS_JOBID", "PBS_NODENUM", "PBS_TASKNUM"),
)
