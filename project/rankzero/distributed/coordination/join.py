"""Starts local processes or performs the rendezvous, for a detected launch."""

import os
import signal
import socket

from rankzero.distributed.connections.line_server import raise_file_limit
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.environments.validate import check_world
from rankzero.distributed.process.spawn import die_with_parent, is_local_process, own_command, run_processes
from rankzero.distributed.process.threads import choose_threads, set_threads
from rankzero.distributed.rendezvous.client import rendezvous
from rankzero.distributed.world import World
from rankzero.messages import RequestError


def join_ranks(requested: RequestedWorld, launch: Launch, count: int) -> World:
    """Starts the local processes that no launcher has started, or performs the rendezvous with all ranks.

    `count` is the number of processes to start; 0 if this process does the work itself.

    Raises:
        RequestError: A rank is missing, or the ranks are not the requested ones.
        SystemExit: In the process that started the local processes, after they have exited.
    """
    # Silences torch's C++ warnings about sockets, as on clusters without reverse name lookup, if torch is not imported
    # yet; in the local processes too, where the script may import it first. Errors are still raised as exceptions.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_processes(launch, count)
    raise_file_limit()
    if is_local_process():
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    world = World(launch)
    if launch.world_size > 1 and launch.externally_created and not launch.uses_agent_store:
        world = find_requested_ranks(requested, launch, requested.auth == "required")
    set_threads(choose_threads(world))  # takes full effect only before torch is imported
    return world


def find_requested_ranks(
    requested: RequestedWorld, launch: Launch, requires_key: bool, listener: socket.socket | None = None
) -> World:
    """Performs the rendezvous, and checks that its result is the requested world. See `rendezvous`.

    Raises:
        RequestError: A rank is missing, or the ranks are not the requested ones. Its `in_rendezvous` is True.
    """
    world = None
    try:
        world = rendezvous(launch, requested.rendezvous_timeout, requested.interface, requires_key, listener)
        check_world(requested, world.launch)
    except RequestError as error:
        error.in_rendezvous = True
        if world:
            world.link.close()
        raise
    return world


def start_processes(launch: Launch, count: int) -> None:
    """Runs this program in `count` local processes and exits with their exit code; does nothing for 0.

    `count` is 1 if the user joins several machines by hand, with one process on each.

    Raises:
        SystemExit: The local processes have exited.
    """
    if count:
        raise SystemExit(run_processes(own_command(), count, launch))
