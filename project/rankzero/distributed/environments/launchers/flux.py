"""Tasks of a Flux job (`flux run`). Flux states the positions of a task, but not the host of rank zero."""

import json
import subprocess
from contextlib import suppress

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint
from rankzero.distributed.environments.launchers import slurm


def found(variables: Variables) -> bool:
    """Returns whether this process is a task of a job. The script of `flux batch` has none of these variables."""
    return "FLUX_TASK_RANK" in variables and "FLUX_JOB_SIZE" in variables


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that the variables of the job describe."""
    job, size = variables.text("FLUX_JOB_ID"), variables.number("FLUX_JOB_SIZE")
    nodes = variables.find_number("FLUX_JOB_NNODES") or 1
    world_id = f"flux {variables.find('FLUX_JOB_ID_PATH') or job}"
    needs_host = nodes > 1 and not (requested.address or "MASTER_ADDR" in variables)
    host = _first_host(job) if needs_host else "127.0.0.1"
    address, port = rendezvous_endpoint(variables, requested, host, world_id)
    return Launch(
        evidence=f"FLUX_JOB_ID={job} FLUX_JOB_SIZE={size}",
        rank=variables.number("FLUX_TASK_RANK"),
        local_rank=None,  # brokers of a test instance may share a machine
        world_size=size,
        local_world_size=size if nodes == 1 else None,
        num_nodes=nodes,
        node_rank=0 if nodes == 1 else None,
        address=address,
        port=port,
        world_id=world_id,
        job_id=job,
    )


def _first_host(job: str) -> str | None:
    """Returns the first host among the resources that Flux has assigned to a job; None if Flux does not answer."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        command = ["flux", "job", "info", job, "R"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return slurm.expand_hosts(json.loads(answer)["execution"]["nodelist"][0])[0]
    return None


LAUNCHER = Launcher(
    "flux",
    found,
    read,
    command="flux run --nodes={nodes} --tasks-per-node={devices} python launch/fit.py ...",
    rank_variables=("FLUX_TASK_RANK",),
    shown_variables=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    one_per_node="flux run --tasks-per-node=1",
    gathers_output=True,
)
