"""No launcher: a single process, local processes started by `process/spawn.py`, and machines joined by hand."""

from rankzero.distributed.environments.launch import Launch, Launcher, RequestedWorld, Variables, rendezvous_endpoint
from rankzero.messages import RequestError

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
    )


def one_per_machine(variables: Variables, requested: RequestedWorld) -> RequestedWorld | None:
    """Returns the request of a process that a container platform started, one on each machine; else None.

    Kubeflow describes the machines in `PET_*`, the variables of torchrun's flags. Other platforms set WORLD_SIZE to the
    number of machines and RANK to the index of this machine; they are recognized if `--devices` requests several
    processes on each machine. A Kubernetes Indexed Job states only JOB_COMPLETION_INDEX, the index of this machine.

    Raises:
        RequestError: The variables contradict the request, or the number of machines may change.
    """
    if "LOCAL_RANK" in variables or requested.launcher != "auto" or requested.node_rank is not None:
        return None
    devices, address, port = requested.devices, requested.address, requested.port
    if "PET_NNODES" in variables and "PET_NODE_RANK" in variables:
        names = ("PET_NNODES", "PET_NODE_RANK")
        address, port = address or variables.find("PET_MASTER_ADDR"), port or variables.find_number("PET_MASTER_PORT")
        if (variables.find("PET_NPROC_PER_NODE") or "auto").isdigit():
            devices = devices or variables.find_number("PET_NPROC_PER_NODE")
    elif "RANK" in variables and (devices or 1) > 1 and requested.nodes == variables.find_number("WORLD_SIZE"):
        names = ("WORLD_SIZE", "RANK")
    elif "RANK" not in variables and "JOB_COMPLETION_INDEX" in variables and (requested.nodes or 1) > 1:
        return requested._replace(node_rank=variables.number("JOB_COMPLETION_INDEX"))
    else:
        return None
    found = f"{names[0]}={variables.text(names[0])}"
    least, _, most = variables.text(names[0]).partition(":")
    if not least.isdigit() or most not in ("", least):
        instead = "torchrun launch/fit.py ..., which reads PET_NNODES"
        raise RequestError("to start a process on each machine", f"{found}: their number may change", instead)
    nodes, node_rank = int(least), variables.number(names[1])
    if requested.nodes not in (None, nodes):
        raise RequestError(f"--nodes {requested.nodes}", f"{found} machines", f"--nodes {nodes}, or omit it")
    return requested._replace(nodes=nodes, devices=devices, node_rank=node_rank, address=address, port=port)


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
    positions = ("_NNODES", "RANK", "SIZE", "_INDEX")
    evidence = " ".join(f"{name}={value}" for name, value in variables.recorded.items() if name.endswith(positions))
    return Launch(
        evidence=evidence or f"--nodes {requested.nodes} --node_rank {requested.node_rank}; {Launch().evidence}",
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
