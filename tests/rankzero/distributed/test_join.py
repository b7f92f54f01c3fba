import pytest

from rankzero.distributed import join
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.join import join_ranks, start_processes


@pytest.fixture
def started(monkeypatch):
    """Records the requested numbers of local processes, and starts none of them."""
    counts = []
    monkeypatch.setattr(join, "run_processes", lambda command, count, launch: counts.append(count) or 7)
    return counts


@pytest.mark.parametrize("count", [1, 2])
def test_the_parent_of_local_processes_exits_with_their_exit_code(started, count):
    with pytest.raises(SystemExit) as caught:
        join_ranks(RequestedWorld(), Launch(), count)
    assert caught.value.code == 7 and started == [count]


def test_a_single_process_starts_no_process_and_needs_no_rendezvous(started, monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")  # restored after the test
    start_processes(Launch(), 0)
    rendezvous_result = join_ranks(RequestedWorld(), Launch(), 0)
    assert (rendezvous_result.launch, len(rendezvous_result.members)) == (Launch(), 1) and not started
