import json
import socket
import time

from rankzero.messages import AnotherRankFailed
from rankzero.preflight.check import CHECK_NAMES, FAIL, WARN, Check, describe_ranks, differences, error_lines, gather

HOSTS = ("n1", "n1", "n2", "n2")


def test_equal_values_are_no_difference():
    assert differences([1, 1, 1, 1], HOSTS) == []


def test_differences_name_the_ranks_and_hosts_of_each_value_most_frequent_first():
    assert differences(["2.15", "2.15", "2.15", "2.14"], HOSTS) == ["2.15 on ranks 0-2 (n1, n2)", "2.14 on rank 3 (n2)"]


def test_many_different_values_are_counted():
    texts = differences(range(20), ["n1"] * 20)
    assert len(texts) == 9 and texts[-1] == "and 12 other values"


def test_many_hosts_are_counted():
    assert describe_ranks(range(6), [f"n{rank}" for rank in range(6)]) == "ranks 0-5 (n0, n1, n2 and 3 more hosts)"


def test_equal_errors_are_one_line():
    errors = {0: "OSError: full\ntraceback", 1: "OSError: full", 3: "ValueError: x"}
    assert error_lines(errors, HOSTS) == ["ranks 0-1 (n1): OSError: full", "rank 3 (n2): ValueError: x"]
    assert error_lines({rank: str(rank) for rank in range(20)}, ["n1"] * 20)[8:] == ["and 12 other errors"]


def test_a_check_is_one_line_and_its_details():
    lines = Check("links", WARN, "one slow link", ("n1 - n2: 0.10 Gbit/s",)).lines()
    assert lines == ["warn     links            one slow link", " " * 26 + "n1 - n2: 0.10 Gbit/s"]


def test_a_check_is_an_object_in_json():
    check = Check(CHECK_NAMES[0], FAIL, "summary", ["detail"], ["advice"], {"x": 1}, blocks=True)
    expected = {"name": "launcher", "status": "fail", "summary": "summary", "details": ["detail"]}
    assert json.loads(json.dumps(check.as_json())) == {**expected, "advice": ["advice"], "values": {"x": 1}}


def leave(coordinator):
    def work():
        if coordinator.launch.rank == 1:
            raise SystemExit(0)
        return "value"

    return gather(coordinator, work)


def test_a_call_of_sys_exit_is_an_error_of_its_rank(on_ranks):
    assert on_ranks(leave, 2) == [(["value", None], {1: "SystemExit: 0"})] * 2


def interrupt(coordinator):
    def work():
        if coordinator.launch.rank == 1:
            raise KeyboardInterrupt

    try:
        return gather(coordinator, work)[1]
    except KeyboardInterrupt:
        return "interrupted"


def test_an_interrupted_rank_keeps_no_other_rank_waiting(on_ranks):
    assert on_ranks(interrupt, 2) == [{1: "KeyboardInterrupt"}, "interrupted"]


def respond_late(coordinator):
    if coordinator.launch.rank == 1:
        time.sleep(2)
        return None
    try:
        gather(coordinator, lambda: None, seconds=0.5)
    except AnotherRankFailed as error:
        return str(error)


def test_a_rank_that_does_not_respond_in_time_is_named(on_ranks):
    assert on_ranks(respond_late, 2)[0] == f"rank 1 on {socket.gethostname()} did not respond within 0.5 s"
