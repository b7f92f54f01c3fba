import pytest


@pytest.fixture
def on_ranks(on_ranks):
    """Like `on_ranks`, after every rank has received the list of all processes, as in `check`."""

    def call(work, world_size, *arguments):
        return on_ranks(share_peers_and_call, world_size, work, *arguments)

    return call


def share_peers_and_call(coordinator, work, *arguments):
    coordinator.share_peers()
    return work(coordinator, *arguments)
