import os

import pytest

from rankzero.distributed import join
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.join import join_ranks, start_processes


@pytest.fixture
def started(monkeypatch):
    """Records the requested numbers of local processes and torch's log level for them, and starts none of them."""
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")  # restored after the test
    del os.environ["TORCH_CPP_LOG_LEVEL"]
    counts = []

    def record(command, count, launch):
        counts.append((count, os.environ["TORCH_CPP_LOG_LEVEL"]))
        return 7

    monkeypatch.setattr(join, "run_processes", record)
    return counts


@pytest.mark.parametrize("count", [1, 2])
def test_the_parent_of_local_processes_exits_with_their_exit_code(started, count):
    with pytest.raises(SystemExit) as caught:
        join_ranks(RequestedWorld(), Launch(), count)
    assert caught.value.code == 7 and started == [(count, "ERROR")]


def test_a_single_process_starts_no_process_and_needs_no_rendezvous(started):
    start_processes(Launch(), 0)
    rendezvous_result = join_ranks(RequestedWorld(), Launch(), 0)
    assert (rendezvous_result.launch, len(rendezvous_result.members)) == (Launch(), 1) and not started
