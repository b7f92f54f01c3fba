"""What a process knows of the other processes after the rendezvous. Does not import torch."""

import socket
from dataclasses import dataclass

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Members, Peer


@dataclass
class RendezvousResult:
    """All processes of a run, or only this process if no rendezvous was needed.

    Args:
        launch: The position of this process among all processes; complete after a rendezvous.
        members: The processes that this process knows; only itself without a rendezvous.
        ip: The address at which rank zero answered.
        listener: The socket on which rank zero accepted the other processes; None on all other ranks.
        key_problem: Why the processes do not share a key; empty if they do.
    """

    launch: Launch
    members: Members
    ip: str
    listener: socket.socket | None = None
    key_problem: str = ""

    @classmethod
    def without_rendezvous(cls, launch: Launch) -> "RendezvousResult":
        """Returns the result for a process that is alone, or that torchrun has already connected to the other ranks."""
        return cls(launch, Members([Peer.this(launch)]), launch.address)
