"""Processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment: PyTorch's `env://`.

Containers (Docker, Kubeflow's PyTorchJob), custom scripts and manual starts set these variables.
"""

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def found(variables: Variables) -> bool:
    """Returns whether a rank or world size is set. MASTER_ADDR alone is no evidence, because users export it."""
    return any(name in variables for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that PyTorch's variables describe."""
    rank, size = variables.number("RANK"), variables.number("WORLD_SIZE")
    local_size = variables.find_number("LOCAL_WORLD_SIZE")
    is_single_machine = local_size == size
    if size > 1 and not requested.port:
        variables.number("MASTER_PORT")  # required: without a job id, no port can be derived
    address, port = rendezvous_endpoint(variables, requested, "127.0.0.1" if size == 1 else None, "env")
    return Launch(
        evidence=f"RANK={rank} WORLD_SIZE={size}",
        rank=rank,
        local_rank=variables.find_number("LOCAL_RANK"),
        world_size=size,
        local_world_size=local_size,
        num_nodes=1 if is_single_machine else variables.find_number("GROUP_WORLD_SIZE"),
        node_rank=0 if is_single_machine else variables.find_number("GROUP_RANK"),
        address=address,
        port=port,
        world_id=f"env {port}",
    )


LAUNCHER = Launcher(
    "env",
    found,
    read,
    command="RANK=0 WORLD_SIZE={processes} MASTER_ADDR=HOST MASTER_PORT=PORT python launch/fit.py ...",
    rank_variables=("RANK",),
    shown_variables=VARIABLES,
)
