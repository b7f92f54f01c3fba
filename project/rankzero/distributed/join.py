"""From a detected launch to a process that has met all ranks. Imports no torch."""

from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.network import silence_socket_warnings
from rankzero.distributed.process.spawn import die_with_parent, is_watched, own_command, run_processes
from rankzero.distributed.process.threads import choose_threads, set_threads
from rankzero.distributed.rendezvous.client import RendezvousResult, find_all_ranks


def join_ranks(requested: RequestedWorld, launch: Launch, count: int) -> RendezvousResult:
    """Starts the processes of this machine that no launcher has started, or meets all ranks as one of them.

    Args:
        requested: The processes that were asked for.
        launch: Where this process stands.
        count: How many processes this one has to start; 0 where it does the work itself.

    Raises:
        RequestError: A rank is missing, or the ranks are not the requested ones.
        SystemExit: In the process that started the others, once they have ended.
    """
    start_processes(launch, count)
    if is_watched():
        die_with_parent()
    silence_socket_warnings()
    rendezvous_result = find_all_ranks(launch, requested)
    threads = choose_threads(rendezvous_result.launch, rendezvous_result.members)
    set_threads(threads)  # takes full effect only before torch is imported
    return rendezvous_result


def start_processes(launch: Launch, count: int) -> None:
    """Runs this program in `count` processes on this machine and leaves with their exit code; does nothing for 0.

    One process may have to be started as well: on each of several machines that are joined by hand.

    Raises:
        SystemExit: The processes have ended.
    """
    if count:
        raise SystemExit(run_processes(own_command(), count, launch))
