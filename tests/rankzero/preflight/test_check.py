import socket
import time

from rankzero.distributed.monitoring.hangs import describe_ranks, differences
from rankzero.messages import AnotherRankFailed
from rankzero.preflight.check import error_lines, gather

HOSTS = ("n1", "n1", "n2", "n2")


def test_differences_and_errors_name_the_ranks_and_hosts_of_each_value_most_frequent_first():
    assert differences([1, 1, 1, 1], HOSTS) == []
    assert differences(["2.15", "2.15", "2.15", "2.14"], HOSTS) == ["2.15 on ranks 0-2 (n1, n2)", "2.14 on rank 3 (n2)"]
    texts = differences(range(20), ["n1"] * 20)
    assert len(texts) == 9 and texts[-1] == "and 12 other values"
    assert describe_ranks(range(6), [f"n{rank}" for rank in range(6)]) == "ranks 0-5 (n0, n1, n2 and 3 more hosts)"
    errors = {0: "OSError: full\ntraceback", 1: "OSError: full", 3: "ValueError: x"}
    assert error_lines(errors, HOSTS) == ["ranks 0-1 (n1): OSError: full", "rank 3 (n2): ValueError: x"]
    assert error_lines({rank: str(rank) for rank in range(20)}, ["n1"] * 20)[8:] == ["and 12 other errors"]


def gather_with_failures(coordinator, ended):
    """Gathers while rank 1 exits, is interrupted, and does not respond; returns the results of this rank."""
    rank, results = coordinator.world.rank, []

    def work(error):
        if rank == 1:
            raise error
        return "value"

    results.append(gather(coordinator, lambda: work(SystemExit(0))))
    try:
        results.append(gather(coordinator, lambda: work(KeyboardInterrupt())))
    except KeyboardInterrupt:
        results.append("interrupted")
    if rank == 1:
        while not ended.exists():
            time.sleep(0.01)
        return results
    try:
        gather(coordinator, lambda: None, seconds=0.5)
    except AnotherRankFailed as error:
        results.append(str(error))
    ended.touch()
    return results


def test_a_rank_that_exits_is_interrupted_or_does_not_respond_keeps_no_other_rank_waiting(on_ranks, tmp_path):
    exited, values = (["value", None], {1: "SystemExit: 0"}), ["value", None]
    late = f"rank 1 on {socket.gethostname()} was still starting after 0.5 s; to wait longer, add --start_timeout 4"
    first, second = on_ranks(gather_with_failures, 2, tmp_path / "ended")
    assert first == [exited, (values, {1: "KeyboardInterrupt"}), late] and second == [exited, "interrupted"]
