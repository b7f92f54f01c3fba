"""Number of compute threads per rank: the rank's share of the machine's cores."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from rankzero.distributed.environments.launch import Variables
from rankzero.distributed.environments.launchers import torchrun
from rankzero.distributed.process.system import parse_cpus, usable_cores
from rankzero.distributed.world import Peer, World

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user sets the number of threads; torch reads both."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user determines how threads wait for one another."""

SPIN_COUNT = 10_000
"""Iterations, some tenths of a millisecond, for which a thread that waits keeps its core busy; 300,000 by default."""

MARK = "RANKZERO_NUM_THREADS"
"""Set to the value of OMP_NUM_THREADS, so that child processes know that Rankzero set that, and not the user."""


@dataclass(frozen=True)
class Threads:
    """Number of threads of one rank.

    Args:
        count: Number of threads; None if the user has set it.
        reason: Origin of the number, such as `12 cores / 4 ranks`.
        uses_all_cores: Whether there is one thread for each core that the rank may use, which is torch's default.
    """

    count: int | None
    reason: str
    uses_all_cores: bool = False


def choose_threads(world: World, environ: Mapping[str, str] = os.environ) -> Threads:
    """Divides the cores that this process may use among the ranks that share them, unless the user set a number.

    `world` includes all processes of this machine; before the rendezvous, only this process.
    """
    if setting := user_setting(environ):
        return Threads(None, setting)
    launch, local_ranks, peers = world.launch, world.devices, list(world.peers.values())
    own_peer = world.peers[world.rank]
    if sum(peer.node_rank == own_peer.node_rank for peer in peers) == local_ranks:
        threads = _divide_cores(own_peer, peers, local_ranks)
    else:
        is_bound = launch.externally_created and launch.launcher != "local" and _is_bound_by_launcher(own_peer)
        threads = _divide_cores(own_peer, [own_peer] * (1 if is_bound else local_ranks), local_ranks)
    limit = _pbs_limit(environ)
    return threads if limit is None or limit >= (threads.count or 1) else Threads(limit, f"PBS set NCPUS={limit}")


def user_setting(environ: Mapping[str, str]) -> str | None:
    """Returns the user's setting of the number of threads, such as `OMP_NUM_THREADS=4`; None without one."""
    for name in VARIABLES:
        value = environ.get(name)
        is_set_by_parent = value == environ.get(MARK) or _pbs_limit(environ) is not None
        if value and not (name == "OMP_NUM_THREADS" and (is_set_by_parent or _is_set_by_torchrun(value, environ))):
            return f"{name}={value}"
    return None


def set_threads(threads: Threads, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets OMP_NUM_THREADS and GOMP_SPINCOUNT for libraries that are not loaded yet and for child processes.

    Sets no number of threads if torch's default is the same one, or if the user has set one. By default, threads that
    wait for one another keep their cores busy for long. Where another program needs these cores, a step then takes many
    times as long (docs/launchers.md).
    """
    if not any(name in environ for name in WAITING):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if threads.count is None or (threads.uses_all_cores and "OMP_NUM_THREADS" not in environ):
        return
    environ["OMP_NUM_THREADS"] = environ[MARK] = str(threads.count)


def _pbs_limit(environ: Mapping[str, str]) -> int | None:
    """Returns the value of OMP_NUM_THREADS if PBS set it; None otherwise.

    PBS sets it and NCPUS to the same number: the cores of a whole chunk, or the job's `ompthreads`.
    """
    value = environ.get("OMP_NUM_THREADS", "")
    is_set_by_pbs = "PBS_JOBID" in environ and value == environ.get("NCPUS") and value.isdecimal()
    return max(1, int(value)) if is_set_by_pbs else None


def _is_set_by_torchrun(value: str, environ: Mapping[str, str]) -> bool:
    """Returns whether torchrun set OMP_NUM_THREADS: to 1, for several workers, if torchrun had no value itself."""
    if value != "1" or not torchrun.found(Variables(environ)):
        return False
    agent_environ = torchrun.agent_environment()
    return agent_environ is not None and "OMP_NUM_THREADS" not in agent_environ


def _divide_cores(own_peer: Peer, peers: Sequence[Peer], local_ranks: int) -> Threads:
    """Returns this rank's share of the cores that it may run on, limited to its share of the cgroup's quota.

    A core that several ranks on this machine may use is divided among them. So ranks that the launcher has bound to
    separate cores keep these cores, and ranks of a job that is bound as a whole divide the job's cores.
    """
    local_peers = [peer for peer in peers if _are_on_same_machine(peer, own_peer)]
    masks = [parse_cpus(peer.cores) for peer in local_peers]
    own_cores = parse_cpus(own_peer.cores)
    share = sum(1 / sum(core in mask for mask in masks) for core in own_cores)
    count, ranks = max(1, int(share + 1e-6)), sum(bool(mask & own_cores) for mask in masks)
    reason = _division_text(len(own_cores), ranks)
    if ranks == 1 and local_ranks > 1:
        reason = f"bound to {reason}"
    if own_peer.quota is not None:
        ranks_in_cgroup = sum(peer.cgroup == own_peer.cgroup for peer in local_peers)
        cpus = max(1, int(own_peer.quota + 0.5))
        if max(1, cpus // ranks_in_cgroup) < count:
            count, reason = max(1, cpus // ranks_in_cgroup), f"CPU quota of {_division_text(cpus, ranks_in_cgroup)}"
    return Threads(count, reason, uses_all_cores=count == len(own_cores))


def _division_text(cores: int, ranks: int) -> str:
    return f"{cores} core{'s' * (cores > 1)}" + (f" / {ranks} ranks" if ranks > 1 else "")


def _are_on_same_machine(first: Peer, second: Peer) -> bool:
    """Returns whether two processes share a machine. Containers differ in host name but share the kernel's boot id."""
    if first.boot or second.boot:
        return first.boot == second.boot
    return first.node_rank == second.node_rank


def _is_bound_by_launcher(own_peer: Peer) -> bool:
    """Returns whether this process may use fewer cores than its parent, because srun or mpirun has bound it."""
    try:
        return parse_cpus(own_peer.cores) < usable_cores(os.getppid())
    except OSError:
        return False
