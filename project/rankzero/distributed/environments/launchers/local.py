"""No launcher: a single process, local processes started by `process/spawn.py`, and machines joined by hand."""

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, meeting_point

MARK = "RANKZERO_LOCAL"
"""Variable set for local processes: the process id of the parent process that supervises them."""

LISTENING = "RANKZERO_LISTENING"
"""Variable set for rank zero of a single machine: file descriptor of a socket that already listens on the port."""


EVIDENCE = "RANKZERO_EVIDENCE"
"""Variable set for local processes: the evidence that the parent process detected."""


def found(variables: Variables) -> bool:
    """Returns whether Rankzero started this process."""
    return MARK in variables


def read(variables: Variables, asked: RequestedWorld) -> Launch:
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
        listening=variables.find_number(LISTENING),
        world_id=f"local {port}",
        externally_created=True,
        variables=variables.read,
    )


def by_hand(variables: Variables, asked: RequestedWorld) -> Launch:
    """Returns the launch of this machine's first process, for machines joined by hand.

    Raises:
        KeyError: One of `--nodes`, `--node_rank`, `--master_addr`, `--master_port` is missing.
        ValueError: The port is not a valid port number.
    """
    if asked.nodes is None:
        raise KeyError("--nodes")
    if asked.node_rank is None:
        raise KeyError("--node_rank")
    if asked.nodes > 1:
        if asked.address is None and "MASTER_ADDR" not in variables:
            raise KeyError("--master_addr")
        if asked.port is None and "MASTER_PORT" not in variables:
            raise KeyError("--master_port")
    address, port = meeting_point(variables, asked, "127.0.0.1", "by hand")
    devices = asked.devices or 1
    return Launch(
        evidence=f"--nodes {asked.nodes} --node_rank {asked.node_rank}; {Launch().evidence}",
        rank=asked.node_rank * devices,
        world_size=asked.nodes * devices,
        num_nodes=asked.nodes,
        local_world_size=devices,
        node_rank=asked.node_rank,
        address=address,
        port=port,
        world_id=f"local {port}",
        externally_created=asked.nodes > 1 and asked.devices == 1,
        variables=variables.read,
    )


LAUNCHER = Launcher("local", found, read)
