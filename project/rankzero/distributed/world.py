"""Who takes part in a run, where, and on which devices."""

import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.distributed.connections.key import Key
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.system import cpu_quota, format_cpus, process_namespace, usable_cores


class Peer(NamedTuple):
    """One process, as it describes itself to the other processes.

    Args:
        rank: Its rank; None if the launcher does not provide one.
        local_rank: Its rank on its machine; None if the launcher does not provide one.
        node_rank: The rank of its machine; None if the launcher does not provide one.
        world_size: The number of processes that it expects.
        host: The name of its machine.
        pid: Its process id.
        boot: The id of the kernel's boot, which distinguishes two machines of the same name.
        pids: The namespace of its process id, which differs between containers.
        cores: The cores that it may run on, in Linux's notation.
        quota: The CPU time that its cgroup allows, in CPUs; None without a limit.
        cgroup: The cgroup that has this limit.
        id: Random text that identifies the process; that of rank zero identifies the run.
        key_fingerprint: Text by which rank zero compares the key of the process with its own, see `Key.fingerprint`;
            empty if it has none.
    """

    rank: int | None
    local_rank: int | None
    node_rank: int | None
    world_size: int
    host: str
    pid: int
    boot: str = ""
    pids: str = ""
    cores: str = ""
    quota: float | None = None
    cgroup: str = ""
    id: str = ""
    key_fingerprint: str = ""

    @classmethod
    def this(cls, launch: Launch, key: Key | None = None) -> "Peer":
        """Returns the description of this process; with `key`, including the key's fingerprint."""
        quota = cpu_quota()
        return cls(
            rank=launch.rank,
            local_rank=launch.local_rank,
            node_rank=launch.node_rank,
            world_size=launch.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=_boot(),
            pids=process_namespace(),
            cores=format_cpus(usable_cores()),
            quota=quota.cpus if quota else None,
            cgroup=quota.cgroup if quota else "",
            id=secrets.token_hex(8),
            key_fingerprint=key.fingerprint(launch.world_id) if key else "",
        )

    @classmethod
    def from_message(cls, values: Any) -> "Peer | None":
        """Returns the process in a message; None if the message is malformed."""
        if not isinstance(values, dict) or set(values) != set(cls._fields):
            return None
        peer = cls(**values)
        ranks = [rank for rank in (peer.rank, peer.local_rank, peer.node_rank) if rank is not None]
        if not all(type(count) is int and 0 <= count < 1 << 63 for count in (*ranks, peer.world_size, peer.pid)):
            return None
        texts = (peer.host, peer.boot, peer.pids, peer.cgroup, peer.id, peer.key_fingerprint)
        is_valid = (
            all(isinstance(text, str) and text.isprintable() and len(text) < 2048 for text in texts)
            and all(rank < peer.world_size for rank in ranks)
            and isinstance(peer.cores, str)
            and re.fullmatch(r"[0-9,-]{0,2048}", peer.cores) is not None
            and (peer.quota is None or (type(peer.quota) in (int, float) and 0 <= peer.quota < 1e9))
        )
        return peer if is_valid else None

    @property
    def machine(self) -> tuple[str, str]:
        """Key that is the same for all processes of one machine."""
        return self.host, self.boot

    def has_key_of(self, other: "Peer") -> bool:
        """Returns whether both processes have the same key, or none."""
        return self.key_fingerprint == other.key_fingerprint


@dataclass
class World:
    """The processes of a run and their devices, as this process knows them.

    The rendezvous finds the processes, and `resolve_world` then sets the devices and the backend.

    Args:
        launch: What the launcher states, and the positions on which the processes have agreed.
        peers: The known processes by rank: on rank zero all, elsewhere rank zero and those of its machine. Without a
            rendezvous, only this one.
        address: The address at which rank zero answered.
        link: The connections to the other ranks (a `Link`), until a `Coordinator` uses them; None in a single process.
        key_problem: Why the processes do not share a key; empty if they do.
        accelerator: `cuda`, `mps` or `cpu`.
        backend: `nccl` or `gloo`.
        index: Index of this process's GPU among the GPUs that it sees.
        shares_gpu: Whether processes share a GPU.
        threads: Source of this process's number of threads, such as `12 cores / 4 ranks`.
    """

    launch: Launch = field(default_factory=Launch)
    peers: dict[int, Peer] = field(default_factory=dict)
    address: str = ""
    link: Any = None
    key_problem: str = ""
    accelerator: str = "cpu"
    backend: str = "gloo"
    index: int = 0
    shares_gpu: bool = False
    threads: str = ""

    def __post_init__(self) -> None:
        self.peers = self.peers or {self.rank: Peer.this(self.launch)}
        self.address = self.address or self.launch.address

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.launch.rank or 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.launch.local_rank or 0

    @property
    def size(self) -> int:
        """Number of processes in total."""
        return self.launch.world_size

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.launch.num_nodes or 1

    @property
    def devices(self) -> int:
        """Number of processes on this machine."""
        return self.launch.local_world_size or 1

    @property
    def parent_reports_lost_ranks(self) -> bool:
        """Whether the process that started the ranks reports a lost one, so that no rank has to."""
        return self.nodes == 1 and self.launch.launcher == "local"

    @property
    def hosts(self) -> list[str]:
        """Host of each rank; empty as long as not all processes are known."""
        return [peer.host for peer in self.peers.values()] if len(self.peers) == self.size else []

    def name_of(self, rank: int) -> str:
        """Returns the name of a rank for messages, such as `rank 3 on n2`; without host if that is unknown."""
        return f"rank {rank} on {self.peers[rank].host}" if rank in self.peers else f"rank {rank}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
