import pytest

from rankzero.distributed.coordination import coordinator
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.rendezvous.client import rendezvous
from running import on_each_rank, reserved_port


@pytest.fixture
def coordinators(monkeypatch):
    """Three ranks of one machine, in threads."""
    monkeypatch.setattr(coordinator.network, "use_interface", lambda requested, detected: detected)

    def make(rank):
        requested = RequestedWorld(start_timeout=10)
        return Coordinator(rendezvous(launch._replace(rank=rank, local_rank=rank), 10), requested)

    with reserved_port() as port:
        place = {"launcher": "env", "port": port, "world_id": "k", "externally_created": True}
        launch = Launch(world_size=3, local_world_size=3, **place)
        started = on_each_rank(range(3), make)
        yield started
        on_each_rank(started, lambda member: member.control_channel.close())
