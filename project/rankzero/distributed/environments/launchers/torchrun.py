"""Processes started by torchrun in any of its forms, including `torch.distributed.launch`."""

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables
from rankzero.distributed.process.system import ancestor_commands, ancestors
from rankzero.messages import RequestError


def found(variables: Variables) -> bool:
    """Returns whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in variables


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that torchrun's variables describe."""
    run_id = variables.find("TORCHELASTIC_RUN_ID") or "none"
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run_id):  # drawn, as `--rdzv-id` is not set
        run_id = run_id[:8]
    attempt = variables.find_number("TORCHELASTIC_RESTART_COUNT") or 0
    address = variables.find("MASTER_ADDR") or "127.0.0.1"
    port = variables.find_number("MASTER_PORT") or 0
    return Launch(
        evidence=f"TORCHELASTIC_RUN_ID={run_id}",
        rank=variables.number("RANK"),
        local_rank=variables.number("LOCAL_RANK"),
        world_size=variables.number("WORLD_SIZE"),
        local_world_size=variables.find_number("LOCAL_WORLD_SIZE"),
        num_nodes=variables.find_number("GROUP_WORLD_SIZE"),
        node_rank=(variables.find_number("GROUP_RANK") or 0),
        address=address,
        port=port,
        world_id=f"torchrun {run_id} {attempt} {address}:{port}",
        job_id=None if run_id == "none" else run_id,  # older torchrun's default of --rdzv-id
        restarts=attempt,
        uses_agent_store=(variables.find("TORCHELASTIC_USE_AGENT_STORE") or "False") == "True",
        elastic=elastic_nodes(variables),
    )


def elastic_nodes(variables: Variables) -> str | None:
    """Returns the setting of an elastic torchrun, such as `--nnodes 1:2`; None for a fixed number of nodes.

    torchrun sets no variable with the range, so it is read from torchrun's command line, or from the user's PET_NNODES.
    """
    command = next((arguments for arguments in ancestor_commands() if _is_torchrun(arguments)), [])
    nodes, setting = option(command, "nnodes"), "--nnodes "
    if not nodes:
        nodes, setting = variables.find("PET_NNODES") or "", "PET_NNODES="
    fewest, _, most = nodes.partition(":")
    return f"{setting}{nodes}" if most and fewest != most else None


def check_elastic(launch: Launch) -> None:
    """Refuses an elastic torchrun whose agents share their store with the processes that they start.

    Each agent (torch 2.15.0, `DynamicRendezvousHandler.next_rendezvous`) then keeps the address of its first
    rendezvous round, even after rank 0 has moved. An agent that joins later waits for an address that is never written.

    Raises:
        RequestError: torchrun is elastic and shares its store.
    """
    if launch.elastic and launch.uses_agent_store:
        raise RequestError(
            f"an elastic torchrun ({launch.elastic})",
            "torchrun shares its store with its workers, so a machine that joins later would wait forever",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ..., the same command on every machine",
        )


def agent_environment() -> dict[str, str] | None:
    """Returns the environment that the nearest torchrun was started with; None if it cannot be read."""
    with suppress(psutil.Error):
        for ancestor in ancestors():
            if _is_torchrun(ancestor.cmdline()):
                return ancestor.environ()
    return None


def option(arguments: list[str], name: str) -> str | None:
    """Returns an option's value from a command line: `--name value` or `--name=value`, also with underscores."""
    for argument, next_argument in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == f"--{name}":
            return value if equals else next_argument
    return None


def _is_torchrun(arguments: list[str]) -> bool:
    return any(Path(word).name == "torchrun" or word.startswith("torch.distributed.") for word in arguments[:4])


LAUNCHER = Launcher(
    "torchrun",
    found,
    read,
    command="torchrun --nnodes {nodes} --nproc-per-node {devices} launch/fit.py ...",
    rank_variables=("RANK",),
)
