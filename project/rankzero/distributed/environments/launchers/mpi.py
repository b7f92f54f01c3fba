"""Processes started by mpirun or mpiexec (Open MPI, hydra, Intel MPI, PALS, PMIx) or jsrun, without MPI or mpi4py.

MPI's variables state ranks, but not the host of rank zero. The first known of these is used: --master_addr or
MASTER_ADDR; this machine, if all processes run on it; the first host of the scheduler's job; the host of mpirun.
Open MPI states mpirun's host in a variable (version 5: as a part of PMIX_NAMESPACE), hydra on the command line of its
proxy. Rank zero refuses an address that belongs to another machine.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint
from rankzero.distributed.environments.launchers import pbs, slurm
from rankzero.distributed.process.system import ancestor_commands

VARIABLES_BY_FAMILY = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "jsrun": tuple(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "PMIx": ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
}
"""MPI family -> its variables for rank, world size, local rank and local world size."""


def found(variables: Variables) -> bool:
    """Returns whether mpirun started this process. srun and Flux set some of PMI's or PALS's variables too."""
    if "OMPI_COMM_WORLD_RANK" in variables or ("PMI_RANK" in variables and "MPI_LOCALNRANKS" in variables):
        return True
    is_task = slurm.found(variables) or "FLUX_TASK_RANK" in variables
    return not is_task and any(name in variables for name in RANK_VARIABLES)


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that MPI's variables describe."""
    for family, names in VARIABLES_BY_FAMILY.items():
        if names[0] in variables and (family != "hydra" or "MPI_LOCALNRANKS" in variables):
            break
    else:
        raise KeyError("OMPI_COMM_WORLD_RANK or PMI_RANK")
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, local_rank = variables.number(rank_name), variables.find_number(local_rank_name)
    local_size = variables.find_number(local_size_name)
    size = variables.find_number(size_name) or (requested.nodes or 0) * (requested.devices or 0) or None
    if size is None and family == "PALS":  # with PMIx, PALS states the size of this node only
        size = len(set(pbs.node_file(variables))) * (local_size or 0) or None
    if size is None:
        raise KeyError(size_name)
    is_single_machine = size in (1, local_size)
    world_id, mpirun_host = _mpirun_id_and_host(variables)
    host = "127.0.0.1" if is_single_machine else (_scheduler_host(variables) or mpirun_host)
    address, port = rendezvous_endpoint(variables, requested, host, world_id)
    return Launch(
        evidence=f"{family}, {size_name}={size}" if size_name in variables else f"{family}, {rank_name}={rank}",
        rank=rank,
        local_rank=local_rank,
        world_size=size,
        local_world_size=local_size,
        num_nodes=1 if is_single_machine else None,
        node_rank=0 if is_single_machine else None,
        address=address,
        port=port,
        world_id=world_id,
        job_id=_job_id(variables),
    )


def runs_within_step(variables: Variables) -> bool:
    """Returns whether a Slurm step around this process also contains mpirun.

    On other machines the result is False: mpirun's daemons run in a Slurm step that mpirun itself created. In Open MPI
    5, mpirun is daemon 0 of its namespace.
    """
    uri = variables.find("OMPI_MCA_orte_hnp_uri")
    is_daemon_of_version_5 = "@0.0;" in (variables.find("PMIX_SERVER_URI2") or "")
    return is_daemon_of_version_5 or (uri is not None and uri == variables.find("OMPI_MCA_orte_local_daemon_uri"))


def _mpirun_id_and_host(variables: Variables) -> tuple[str, str | None]:
    """Returns a unique id of this mpirun, and the address of its host (comma-separated if there are several)."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
    namespace = next(filter(None, map(variables.find, names)), None)
    uri = variables.find("OMPI_MCA_orte_hnp_uri") or ""
    if namespace:
        host = re.search(r"tcp://([^:;]+):\d+", uri) or re.match(r"prte\w*-(.+)-\d+@", namespace)
        return f"mpi {namespace} {uri}", host[1] if host else None
    for arguments in ancestor_commands():
        command = " ".join(arguments)
        control = re.search(r"--control-port (\S+):(\d+)", command)
        if control := control or re.search(r"--upstream-host (\S+) --upstream-port (\d+)", command):
            return f"mpi {control[1]}:{control[2]}", control[1]
    return f"mpi {_job_id(variables)} of {os.getuid()}", None


def _scheduler_host(variables: Variables) -> str | None:
    """Returns the first host of the job of Slurm, PBS, LSF or Azure Batch; None if unknown."""
    lsf_hosts = (variables.find("LSB_HOSTS") or "").split() or (variables.find("LSB_MCPU_HOSTS") or "").split()[::2]
    with suppress(KeyError, OSError, UnicodeError):
        lsf_hosts = Path(variables.text("LSB_DJOB_RANKFILE")).read_text().split()
    lsf_hosts = lsf_hosts[int("JSM_NAMESPACE_RANK" in variables) :]  # with jsrun, the first is the job script's node
    azure_host = (variables.find("AZ_BATCH_MASTER_NODE") or "").partition(":")[0]
    hosts = slurm.expand_hosts(variables.find("SLURM_JOB_NODELIST") or "") or pbs.node_file(variables) or lsf_hosts
    return next(iter(hosts), azure_host or None)


def _job_id(variables: Variables) -> str | None:
    lsf_job, index = variables.find("LSB_JOBID"), variables.find("LSB_JOBINDEX") or "0"  # 0: of no job array
    lsf_id = f"{lsf_job}[{index}]" if lsf_job and index != "0" else lsf_job
    return variables.find("SLURM_JOB_ID") or variables.find("PBS_JOBID") or lsf_id


RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "PMI_RANK", "PMIX_RANK")

LAUNCHER = Launcher(
    "mpi",
    found,
    read,
    command="mpirun -np {processes} python launch/fit.py ...",
    rank_variables=RANK_VARIABLES,
    shown_variables=RANK_VARIABLES,
    one_per_node="mpirun --map-by ppr:1:node",
    gathers_output=True,
)
