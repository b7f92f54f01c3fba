"""No launcher: a single process, local processes started by `process/spawn.py`, and machines joined by hand."""

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint

SUPERVISOR_PID = "RANKZERO_LOCAL"
"""Variable set for local processes: the process id of the parent process that supervises them."""

LISTENING_FD = "RANKZERO_LISTENING"
"""Variable set for rank zero of a single machine: file descriptor of a socket that already listens on the port."""

EVIDENCE = "RANKZERO_EVIDENCE"
"""Variable set for local processes: the evidence that the parent process detected."""


def found(variables: Variables) -> bool:
    """Returns whether Rankzero started this process."""
    return SUPERVISOR_PID in variables


def read(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch that the variables from `process/spawn.py` describe."""
    devices, nodes = variables.number("LOCAL_WORLD_SIZE"), variables.number("GROUP_WORLD_SIZE")
    address, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    return Launch(
        evidence=f"--devices {devices}; {variables.find(EVIDENCE) or Launch().evidence}",
        rank=variables.number("RANK"),
        local_rank=variables.number("LOCAL_RANK"),
        world_size=variables.number("WORLD_SIZE"),
        local_world_size=devices,
        num_nodes=nodes,
        node_rank=variables.number("GROUP_RANK"),
        address=address,
        port=port,
        listening_fd=variables.find_number(LISTENING_FD),
        world_id=f"local {port}",
        externally_created=True,
        variables=variables.recorded,
    )


def manual_launch(variables: Variables, requested: RequestedWorld) -> Launch:
    """Returns the launch of this machine's first process, for machines joined by hand.

    Raises:
        KeyError: One of `--nodes`, `--node_rank`, `--master_addr`, `--master_port` is missing.
        ValueError: The port is not a valid port number.
    """
    if requested.nodes is None:
        raise KeyError("--nodes")
    if requested.node_rank is None:
        raise KeyError("--node_rank")
    if requested.nodes > 1:
        if requested.address is None and "MASTER_ADDR" not in variables:
            raise KeyError("--master_addr")
        if requested.port is None and "MASTER_PORT" not in variables:
            raise KeyError("--master_port")
    address, port = rendezvous_endpoint(variables, requested, "127.0.0.1", "by hand")
    devices = requested.devices or 1
    return Launch(
        evidence=f"--nodes {requested.nodes} --node_rank {requested.node_rank}; {Launch().evidence}",
        rank=requested.node_rank * devices,
        world_size=requested.nodes * devices,
        num_nodes=requested.nodes,
        local_world_size=devices,
        node_rank=requested.node_rank,
        address=address,
        port=port,
        world_id=f"local {port}",
        externally_created=requested.nodes > 1 and requested.devices == 1,
        variables=variables.recorded,
    )


LAUNCHER = Launcher("local", found, read)
